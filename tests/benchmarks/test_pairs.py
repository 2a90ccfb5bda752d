"""`benchmarks pairs`: layers that ranks share in an engine, whose times are emulated and whose losses are real."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks import pairs
from benchmarks.overlap.cases import OverlapCase
from benchmarks.overlap.emulator import PROCESSOR, Machine
from benchmarks.overlap.engines import DEEPSPEED, ENGINES, OrderedPairs, SharedCase
from benchmarks.overlap.orders import backward_then_forward, round_robin
from benchmarks.overlap.shared_layer import HIDDEN, SharedLayer, SharedRank, SharedStage
from weft.engine.backward import SplitBackward
from weft.engine.parallel.axis import Alone
from weft.engine.strands.yielding_group import YieldPoint
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.segments import LinkScope, Segment, StageStrands, Strand, StrandPair, WeightGradient
from weft.tools.ranks import run_ranks


def layer(seconds):
    """Return a layer of segments and collectives with these durations."""
    busy = Segment(seconds, LinkScope.inside_host, seconds, trailing_s=seconds / 2)
    return StrandPair(
        Strand((busy, busy, Segment(seconds))),
        Strand((busy, busy, busy, Segment(seconds))),
        tuple(WeightGradient(after, seconds) for after in (0, 0, 2, 3)),
    )


LAYER = layer(1e-6)


def stage(*, chunked=False):
    rank = SharedRank(Machine(OverlapTable()), Alone("tensor"), YieldPoint())
    make = partial(SharedLayer, LAYER, rank, chunked=chunked)
    return SharedStage(make, rank.group, index=0, layers=[range(2), range(2, 4)]), rank


def steps(rank):
    return "".join(span.step.value for span in rank.machine.spans if span.lane == PROCESSOR)


def test_a_backward_has_its_weight_gradients_behind_the_segments_that_make_them():
    layers, rank = stage()
    layers(None, {"input_ids": torch.ones(1, 2)}).sum().backward()
    assert steps(rank) == 2 * "FFF" + 2 * "BWWBBWBW"
    assert (rank.live, rank.most_live) == (0, 2)


def test_a_backward_in_two_parts_plays_them_later_and_gives_the_same():
    gradients = []
    for split in (False, True):
        layers, rank = stage()
        hidden = torch.ones(1, HIDDEN, requires_grad=True)
        backward = SplitBackward(layers)
        output, saved = backward.forward(partial(layers, hidden, {}), hidden, split=split)
        backward.input_backward(saved, torch.ones_like(output))
        assert steps(rank) == 2 * "FFF" + (2 * "BBBB" if split else 2 * "BWWBBWBW")
        backward.weight_backward(saved)
        backward.remove()
        gradients.append([parameter.grad for parameter in layers.parameters()])
        assert steps(rank).count("W") == len(gradients[-1]) == 8
    for whole, parts in zip(*gradients, strict=True):
        assert whole.abs() > 0 and torch.equal(whole, parts)


def test_chunks_compute_the_same_as_whole_layers():
    found = []
    for chunked in (False, True):
        layers, rank = stage(chunked=chunked)
        output = layers(None, {"input_ids": torch.ones(1, 2)})
        output.sum().backward()
        found.append([output, *(parameter.grad for parameter in layers.parameters())])
        assert (rank.live, rank.most_live) == (0, 2)
        lanes = [span.end_s - span.start_s for span in rank.machine.spans if span.lane != PROCESSOR]
        assert sum(lanes) >= 2 * (LAYER.comm_s) * 0.99
    assert len(lanes) > 2 * 5, "links carried chunks"
    for whole, parts in zip(*found, strict=True):
        assert torch.allclose(whole, parts)


@pytest.mark.parametrize("order", [round_robin, backward_then_forward])
def test_pairs_can_follow_any_order(order):
    layers = StageStrands(((LAYER, 2),))
    found = OrderedPairs((layers, layers), OverlapTable(), 0.0, order)
    assert found.plan(0, 1) == order(layers.whole)
    assert found.scale(0, 1) == found.plan(0, 1).seconds(layers.whole, OverlapTable()) / layers.whole.sequential_s


def test_segments_of_a_stage_are_those_that_plans_are_made_for():
    """So that the engine, which compares them in its debug mode, finds nothing."""
    traced = OverlapCase("tensor", 2, 0.31, layers=1)
    ((layer, _),) = traced.stage().runs
    whole = SharedCase(layer=layer, table=traced.table).pairs(4).stages[0].whole
    for strand, own in ((whole.forward, layer.forward), (whole.backward, layer.backward)):
        ends = sum(segment.link is not None for segment in own.segments)
        assert len(strand.segments) == 2 * ends + strand.continues


def test_what_falls_short_is_named():
    plain = pairs.Found(1.0, 0.0, (0.5, 0.25), 8, 1.0)
    good = {pairs.PLAIN: plain, pairs.HALVES: plain, pairs.OURS: replace(plain, seconds=0.8)}
    assert pairs.unmet(good) == []
    assert "faster" in pairs.unmet({**good, pairs.HALVES: replace(plain, seconds=0.7)})[0]
    assert "throughput" in pairs.unmet({**good, pairs.OURS: replace(plain, seconds=0.95)})[0]
    differing = pairs.unmet({**good, pairs.OURS: replace(good[pairs.OURS], losses=(0.5, 0.2500001))})
    assert len(differing) == 1 and "differ" in differing[0]
    lost = pairs.unmet({**good, DEEPSPEED: replace(plain, losses=(0.5, float("nan")))})
    assert len(lost) == 1 and DEEPSPEED in lost[0]
    assert len(pairs._rows(good)) == 3


@pytest.mark.parametrize(
    "argument", ["--share 1", "--share 0", "--layers 12", "--microbatches 7", "--seconds 0", "--engines W"]
)
def test_what_cannot_be_measured_is_refused(argument):
    with pytest.raises(ValueError, match=argument.split()[0]):
        pairs.main(argument.split())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_train_alike():
    case = SharedCase(
        layer=layer(1e-3), table=OverlapTable(), ranks=2, layers=4, microbatches=4, steps=2, timeout_s=200.0
    )
    found = {name: run_ranks(4, engine, case, timeout_s=200.0)[0] for name, engine in ENGINES.items()}
    figures = {name: pairs.Found(1.0, 0.0, run.losses, run.most_live, run.planned_s) for name, run in found.items()}
    assert [what for what in pairs.unmet(figures) if "losses" in what] == []
    assert len(set(found[pairs.PLAIN].losses)) == 3 == len(found[pairs.PLAIN].losses)
    live = {name: run.most_live for name, run in found.items()}
    assert live[pairs.PLAIN] == live[pairs.HALVES] <= live[pairs.OURS] <= live[pairs.PLAIN] + 2
    planned = {name: run.planned_s for name, run in found.items()}
    assert planned[pairs.OURS] <= planned[pairs.ROUND_ROBIN] <= planned[pairs.HALVES]
