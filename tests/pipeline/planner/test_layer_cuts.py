"""The layers of a route's ranks: by what they take on each site's GPUs, within each site's memory."""

from dataclasses import replace
from itertools import accumulate

import pytest

from tests.pipeline.planner.planned import cluster, model, site
from weft.pipeline.planner.cutting import RankSpeed, cut_layers
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layer_cuts import LayerCuts
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.speeds import busy_s

SOME = cluster(site("slow"), site("fast", gpu="H100"))
SHAPE = Shape(num_stages=3, replicas=2, microbatches=4)


def heavier(work):
    """Each layer takes more than the one before; the embedding and the head take time, too."""
    layers = tuple(replace(work.layers[0], matmul_flops=1e13 * (4 + number)) for number in range(len(work.layers)))
    before, after = replace(work.before, matmul_flops=2e13), replace(work.after, matmul_flops=3e13)
    return replace(work, layers=layers, before=before, after=after)


def by_hand(estimates, shape, on, max_memory):
    """Speeds one by one, and as many layers as fit, counted up."""
    sites, work, last = estimates.cluster.sites, estimates.work, len(on) - 1
    ranks = []
    for rank, number in enumerate(on):
        place = sites[number]
        each = [busy_s(estimates.stage_cost(layer, 1, shape, place)) for layer in work.layers]
        extra_s = busy_s(estimates.stage_cost(work.before, 0, shape, place)) if rank == 0 else 0.0
        extra_s += busy_s(estimates.stage_cost(work.after, 0, shape, place)) if rank == last else 0.0
        most = 0
        for count in range(1, len(work.layers) + 1):
            held = estimates.rank_work(
                range(len(work.layers) - count, len(work.layers)), first=rank == 0, last=rank == last
            )
            kept = estimates.activation_bytes(held, count, shape)
            if estimates.memory(held, count, shape, kept).total <= max_memory * place.gpu.memory_bytes:
                most = count
        ranks.append(RankSpeed(list(accumulate(each, initial=0.0)), extra_s, most // len(shape.legs)))
    return ranks


@pytest.mark.parametrize("on", [(0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize("max_memory", [0.8, 0.12, 0.09, 0.001])
@pytest.mark.parametrize("more", [{}, {"tensor": 2, "checkpointing": True}, {"zero_stage": 3}, {"microbatches": 1}])
def test_a_cut_is_the_best_for_the_speed_and_memory_of_each_rank(on, max_memory, more):
    estimates, shape = Estimates(SOME, heavier(model(layers=9))), replace(SHAPE, **more)
    cuts = LayerCuts(estimates, max_memory)
    expected = cut_layers(9, by_hand(estimates, shape, on, max_memory))
    assert cuts.of(shape, on) == expected == cuts.of(shape, on)
    assert max_memory > 0.01 or expected is None


def test_virtual_stages_of_one_rank_share_its_memory():
    estimates, shape = Estimates(SOME, heavier(model(layers=9))), replace(SHAPE, arrangement="fold", num_stages=2)
    for max_memory in (0.8, 0.3, 0.15, 0.1):
        on = (0, 1, 1, 0)
        assert LayerCuts(estimates, max_memory).of(shape, on) == cut_layers(
            9, by_hand(estimates, shape, on, max_memory)
        )


def test_what_is_known_of_one_shape_is_not_taken_for_another():
    estimates = Estimates(SOME, heavier(model(layers=9)))
    cuts = LayerCuts(estimates, 0.1)
    for more in (
        {},
        {"zero_stage": 2},
        {"zero_stage": 2, "microbatches": 1},
        {"replicas": 8},
        {"zero_stage": 3},
        {"microbatch_size": 4},
        {"checkpointing": True},
        {"tensor": 4},
    ):
        shape = replace(SHAPE, **more)
        for on in ((0, 1, 1), (1, 1, 0)):
            assert cuts.of(shape, on) == cut_layers(9, by_hand(estimates, shape, on, 0.1)), more


SHARES = [0.02 * 1.06**number for number in range(50)]
"""Of memory, from next to nothing to more than enough, closely enough for every layer to make a difference."""


def test_memory_is_that_of_the_first_and_the_last_rank_where_they_hold_the_ends():
    work, shape = model(layers=9), replace(SHAPE, zero_stage=0)
    large = replace(work, before=replace(work.before, parameters=5 * work.layers[0].parameters))
    estimates = Estimates(SOME, large)
    for share in SHARES:
        expected = cut_layers(9, by_hand(estimates, shape, (0, 0, 0), share))
        assert LayerCuts(estimates, share).of(shape, (0, 0, 0)) == expected


def test_one_micro_batch_takes_less_memory_than_several():
    estimates, many = Estimates(SOME, model(layers=30)), replace(SHAPE, zero_stage=2, replicas=8)
    differ = 0
    for share in SHARES:
        cuts, found = LayerCuts(estimates, share), []
        for shape in (many, replace(many, microbatches=1)):
            found.append(cuts.of(shape, (0, 0, 0)))
            assert found[-1] == cut_layers(30, by_hand(estimates, shape, (0, 0, 0), share))
        differ += found[0] != found[1]
    assert differ


def test_seconds_are_those_of_one_layer_each():
    """What GPUs exchange for each layer counts once."""
    estimates, shape = Estimates(SOME, heavier(model(layers=3))), replace(SHAPE, tensor=4)
    place = SOME.sites[0]
    sums, before_s, after_s = LayerCuts(estimates, 0.8)._seconds(shape, place)
    each = [busy_s(estimates.stage_cost(layer, 1, shape, place)) for layer in estimates.work.layers]
    assert sums == list(accumulate(each, initial=0.0))
    assert before_s == busy_s(estimates.stage_cost(estimates.work.before, 0, shape, place))
    assert after_s == busy_s(estimates.stage_cost(estimates.work.after, 0, shape, place))
