"""Costs fitted to a timeline are those that it was made with, as far as it shows them."""

from dataclasses import replace

import pytest

from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.profile import fit_costs
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
    assert replace(fitted.stages[1], jitter=0.0) == replace(
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
