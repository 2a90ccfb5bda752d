"""Costs fitted to a timeline are those that it was made with, as far as it shows them."""

from dataclasses import replace

import pytest

from tests.pipeline.strands.pairs import INSIDE, llama_layer
from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.fitting import fit_costs, fit_overlap
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import PairCosts
from weft.pipeline.strands.segments import Kind
from weft.pipeline.strands.stages import StageStrands
from weft.pipeline.timeline import Span, Timeline

UNIT = CostModel.unit(2)
SPLIT = {Op.F: 2.0, Op.I: 3.0, Op.W: 4.0, Op.REDUCE_GRAD: 5.0, Op.UNSHARD: 6.0, Op.STEP: 7.0}


def timeline(seconds, stage=1):
    """Each action three times: once as long as it takes, once shorter, once much longer."""
    spans = [
        Span(0, "send" if op is Op.SEND_F else "compute", (Action(op, stage, m),), 10.0, 10.0 + scale * each_s)
        for op, each_s in seconds.items()
        for m, scale in enumerate((1.0, 0.5, 100.0))
    ]
    return Timeline("measured", 1, tuple(spans), (0.0,), (0,))


def test_what_was_measured_is_taken_and_the_rest_left():
    fitted = fit_costs([timeline(SPLIT | {Op.SEND_F: 8.0})], UNIT)
    assert fitted.stages[0] == UNIT.stages[0]
    assert fitted.stages[1] == replace(
        StageCost(forward_s=2.0, input_s=3.0, weight_s=4.0, activation_bytes=1.0, output_bytes=1.0),
        reduce_s=5.0,
        unshard_s=6.0,
        step_s=7.0,
        send_s=8.0,
    )


def test_a_backward_in_one_piece_counts_half_and_half():
    (_, stage) = fit_costs([timeline({Op.B: 6.0})], UNIT).stages
    assert (stage.forward_s, stage.input_s, stage.weight_s) == (1.0, 3.0, 3.0)


def test_without_a_backward_the_known_one_is_halved():
    costs = replace(UNIT, stages=(replace(UNIT.stages[0], input_s=1.0, weight_s=5.0),) * 2)
    (_, stage) = fit_costs([timeline({Op.F: 2.0})], costs).stages
    assert (stage.input_s, stage.weight_s) == pytest.approx((3.0, 3.0))


def test_sends_count_where_the_rank_itself_spends_the_time():
    spans = tuple(replace(span, lane="F>1") for span in timeline({Op.SEND_F: 8.0}).spans)
    predicted = Timeline("predicted", 1, spans, (0.0,), (0,))
    assert fit_costs([predicted], UNIT) == UNIT


def overlapping(factor):
    return OverlapTable({(kind, INSIDE): factor for kind in Kind})


@pytest.mark.parametrize(("planned", "real"), [(0.9, 0.3), (0.2, 0.8), (0.6, 0.6)])
def test_pairs_show_how_well_operators_overlap(planned, real):
    stage = StageStrands(((llama_layer(), 4),))
    pairs = PairCosts((stage, stage), overlapping(planned))
    forward, backward, other = Action(Op.F, 0, 3), Action(Op.B, 1, 2), Action(Op.B, 0, 2)
    pair_s = 30.0 * pairs.scale_under(overlapping(real), 0, 1, True)
    slots = [((forward,), 10.0), ((backward,), 20.0), ((forward, backward), pair_s), ((forward, other), 99.0)]
    spans = tuple(Span(0, "compute", slot, 1.0, 1.0 + seconds) for slot, seconds in slots)
    costs = replace(UNIT, pairs=pairs)
    found, faster = fit_overlap([Timeline("measured", 1, spans, (0.0,), (0,))], costs)
    assert all(factor == pytest.approx(real, abs=1e-3) for factor in found.compute.values())
    assert (faster > 1.05, faster < 0.95) == (real > planned, real < planned)
    assert fit_overlap([Timeline("measured", 1, spans[:2], (0.0,), (0,))], costs) is None, "no pair"
    assert fit_overlap([Timeline("measured", 1, spans[1:], (0.0,), (0,))], costs) is None, "no forward alone"
