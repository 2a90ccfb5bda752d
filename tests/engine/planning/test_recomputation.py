"""Recomputation that a plan chooses under a memory cap."""

from dataclasses import replace

import pytest

from tests.engine.planning.given import facts_of
from weft.conf.checks import check
from weft.conf.compose import compose
from weft.conf.schema import Recompute
from weft.engine.planning.run_plan import plan_run
from weft.pipeline.memory import held_along

NONE, LAYERS = Recompute.none, Recompute.layers


def plan_of(cap_bytes=0, kind="auto", schedule="1f1b", placement="straight", bytes_per_s=1e8, settings=()):
    config = compose(
        [
            f"pipeline.schedule={schedule}",
            f"pipeline.placement={placement}",
            "pipeline.stages=4",
            "pipeline.microbatches=8",
            "pipeline.search_seconds=0",
            f"pipeline.memory_cap_bytes={cap_bytes}",
            f"pipeline.recompute={kind}",
            "data.sequence_length=64",
            *settings,
        ]
    )
    return plan_run(config, replace(facts_of(config), flops_per_s=1e10, bytes_per_s=bytes_per_s))


def most_held(plan):
    return [max(held.num_bytes for held in held_along(row, plan.costs)) for row in plan.schedule().rows]


def test_auto_recomputes_on_the_ranks_of_1f1b_that_hold_too_much():
    alone = plan_of(kind="none")
    held = most_held(alone)
    assert plan_of(int(max(held))).recompute == (NONE,) * 4, "everything fits"
    plan = plan_of(int(held[2]))
    assert plan.recompute[2:] == (NONE, NONE) and NONE not in plan.recompute[:2]
    assert max(most_held(plan)) <= held[2] < max(held)
    assert alone.step_s < plan.step_s < plan_of(kind="layers").step_s
    assert "backwards recompute" in plan.summary() and "recompute" not in alone.summary()


def test_attention_is_enough_where_little_is_missing():
    held = most_held(plan_of(kind="none"))
    assert plan_of(int(0.95 * held[0])).recompute == (Recompute.attention, NONE, NONE, NONE)


def test_auto_recomputes_elementwise_operations_where_memory_is_fast():
    held = most_held(plan_of(kind="none"))
    plan = plan_of(int(0.95 * held[0]), bytes_per_s=1e10)
    assert plan.recompute == (Recompute.elementwise, NONE, NONE, NONE)
    assert max(most_held(plan)) <= 0.95 * held[0]
    assert "backwards recompute elementwise of stages 0" in plan.summary()
    slower = [plan_of(int(0.95 * held[0]), kind, bytes_per_s=1e10).step_s for kind in ("attention", "layers")]
    assert plan.step_s < min(slower)


def test_auto_leaves_elementwise_operations_to_fused_kernels():
    held = most_held(plan_of(kind="none"))
    plan = plan_of(int(0.95 * held[0]), bytes_per_s=1e10, settings=["model.kernels=fused"])
    assert plan.recompute == (Recompute.attention, NONE, NONE, NONE)


@pytest.mark.parametrize("placement", ["straight", "fold"])
def test_auto_has_a_schedule_under_a_cap_that_is_impossible_without_recomputation(placement):
    alone = plan_of(kind="none", schedule="auto", placement=placement).costs.stages
    least = min(
        sum(alone[s].activation_bytes for s in held)
        for held in plan_of(placement=placement, kind="none", schedule="auto").placement.rank_stages
    )
    cap = int(0.9 * least)
    with pytest.raises(ValueError, match=r"one micro-batch alone holds .* set pipeline.recompute=auto"):
        plan_of(cap, "none", "auto", placement)
    plan = plan_of(cap, "auto", "auto", placement)
    assert max(most_held(plan)) <= cap * (1 + 1e-9)
    with pytest.raises(ValueError, match="one micro-batch alone holds"):
        plan_of(1000, "auto", "auto", placement)


def test_auto_does_not_recompute_where_waiting_is_cheaper():
    """A cap of one micro-batch is met without recomputation, and `auto` compares what both cost."""
    held = most_held(plan_of(kind="none"))
    plan = plan_of(int(held[3] * 1.01), "auto", "auto")
    without = plan_of(int(held[3] * 1.01), "none", "auto")
    assert plan.step_s <= without.step_s


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.tensor=2"], "parallel.tensor=2 ranks share layers"),
        (["parallel.context=2", "data.sequence_length=64"], "parallel.context=2 ranks share layers"),
        (["pipeline.costs_file=costs.yaml"], "has costs of one choice only"),
    ],
)
def test_unsupported_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=f"pipeline.recompute=auto: .*{message}"):
        check(compose(["pipeline.recompute=auto", *settings]))
