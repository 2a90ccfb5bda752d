"""Costs of stages and links by hand: parts and wholes, what is not given, and what pipelines share."""

from dataclasses import fields, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.action import Op
from weft.pipeline.costs import CostModel, LinkCost, StageCost, even_counts

NAMES = [field.name for field in fields(StageCost)]
SENT = {"output_bytes", "send_s"}
"""Bytes that a stage sends on, for any number of layers."""
ONE = StageCost(**{name: float(2**number) for number, name in enumerate(NAMES)})


@given(st.integers(0, 200), st.integers(1, 30))
def test_counts_are_even_with_the_remainder_in_the_middle(total, parts):
    counts = even_counts(total, parts)
    assert len(counts) == parts and sum(counts) == total and max(counts) - min(counts) <= 1
    more = [part for part, count in enumerate(counts) if count > min(counts)]
    if more:
        assert more == list(range(more[0], more[-1] + 1)), "side by side"
        before, after = more[0], parts - 1 - more[-1]
        assert after - before in (0, 1)


def test_what_is_not_given_of_a_stage_or_a_link_is_none():
    given_ones = {"forward_s", "input_s", "weight_s", "activation_bytes"}
    least = StageCost(forward_s=1.0, input_s=2.0, weight_s=3.0, activation_bytes=4.0)
    assert all(getattr(least, name) == 0.0 for name in NAMES if name not in given_ones)
    free = LinkCost()
    assert free.latency_s == free.occupancy_s(1e18) == free.transit_s(1e18) == 0.0
    assert (free.bandwidth_bps, free.pair_bps, free.streams, free.sharing) == (inf, inf, 1, 1)


def test_each_operation_takes_its_seconds():
    seconds = {
        Op.F: ONE.forward_s,
        Op.I: ONE.input_s,
        Op.W: ONE.weight_s,
        Op.B: ONE.input_s + ONE.weight_s,
        Op.REDUCE_GRAD: ONE.reduce_s,
        Op.UNSHARD: ONE.unshard_s,
        Op.STEP: ONE.step_s,
        Op.SEND_F: ONE.send_s,
        Op.SEND_B: ONE.send_s,
    }
    assert {op: ONE.seconds(op) for op in Op} == {op: seconds.get(op, 0.0) for op in Op}


def test_a_whole_is_the_sum_of_its_parts_but_sends_what_the_last_does():
    """Its durations vary as those of the part that varies most."""
    other = StageCost(**{name: 1000.0 + number for number, name in enumerate(NAMES)})
    whole = StageCost.whole([ONE, other, ONE])
    for name in NAMES:
        one, two = getattr(ONE, name), getattr(other, name)
        assert getattr(whole, name) == (max(one, two) if name == "jitter" else one if name in SENT else 2 * one + two)
    assert StageCost.whole([other, ONE]).send_s == ONE.send_s
    assert StageCost.whole([ONE]) is ONE
    part = ONE.part(4)
    for name in NAMES:
        assert getattr(part, name) == getattr(ONE, name) / (1 if name in {*SENT, "jitter"} else 4)


@given(st.integers(1, 12), st.integers(1, 12))
def test_pieces_are_joined_or_divided_into_stages(pieces, stages):
    made = CostModel(stages=tuple(replace(ONE, forward_s=float(number + 1)) for number in range(pieces)))
    if pieces < stages and stages % pieces:
        with pytest.raises(ValueError, match=f"of at least {stages} layers"):
            made.cut(stages)
        return
    cut = made.cut(stages)
    assert len(cut.stages) == stages
    assert sum(stage.forward_s for stage in cut.stages) == pytest.approx(sum(range(pieces + 1)))
    if pieces >= stages:
        begin = 0
        for stage, count in zip(cut.stages, even_counts(pieces, stages), strict=True):
            assert stage.forward_s == sum(range(begin + 1, begin + count + 1))
            begin += count
    else:
        each = stages // pieces
        assert [stage.forward_s for stage in cut.stages] == pytest.approx(
            [(number // each + 1) / each for number in range(stages)]
        )


def test_a_transfer_holds_the_uplink_and_leaves_at_the_lower_bandwidth():
    link = LinkCost(latency_s=9.0, bandwidth_bps=4e6, pair_bps=1e6, sharing=2)
    assert link.occupancy_s(1e6) == pytest.approx(1.0)
    assert link.transit_s(1e6) == pytest.approx(4.0)
    assert replace(link, pair_bps=8e6).transit_s(1e6) == pytest.approx(1.0)


def test_a_cell_has_all_stages_and_pools_the_links_between_sites():
    local, wan, one = LinkCost(latency_s=1.0), LinkCost(latency_s=2.0), LinkCost(latency_s=3.0, bandwidth_bps=8.0)
    made = CostModel(stages=(ONE, replace(ONE, input_s=7.0)), local=local, wan=wan, wan_links=(((0, 1), one),))
    cell = made.for_cell(3)
    assert cell.stages == made.stages * 3
    assert cell.link(0, 0) == cell.link(2, 2) == local, "of a site nothing is pooled"
    assert cell.link(1, 0) == replace(wan, sharing=3) and cell.link(0, 1) == replace(one, sharing=3)
    assert made.for_cell(1) == made


def test_unit_costs_are_a_second_and_a_byte():
    link = LinkCost(latency_s=5.0)
    unit = CostModel.unit(3, wan=link)
    one = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0, output_bytes=1.0)
    assert unit == CostModel(stages=(one,) * 3, wan=link) and unit.local == LinkCost()
    assert CostModel.unit(1, local=link).local == link


def test_without_strands_a_pair_takes_what_its_halves_do():
    assert CostModel.unit(2).pair_scale(0, 1, Op.B) == 1.0 == CostModel.unit(2).least_pair_scale([0, 1])
