"""Offloads that a plan inserts under a memory cap, and settings that it refuses."""

from dataclasses import replace

import pytest

from tests.engine.planning.given import facts_of
from tests.engine.tiny import many_losses, tiny_config
from weft.conf.checks import check
from weft.conf.compose import compose
from weft.engine.planning.run_plan import plan_run
from weft.engine.stages.files.loading import load_hf_config
from weft.pipeline.action import Op
from weft.pipeline.memory import peak_bytes
from weft.tools.ranks import run_ranks


def plan_of(*settings, cap_bytes=0, offload=True):
    config = compose(
        [
            "pipeline.stages=4",
            "pipeline.microbatches=8",
            "pipeline.search_seconds=0",
            "data.sequence_length=64",
            f"pipeline.offload={offload}",
            f"pipeline.memory_cap_bytes={cap_bytes}",
            *settings,
        ]
    )
    return plan_run(config, replace(facts_of(config), flops_per_s=1e10, host_bps=1e9))


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_plan_offloads_where_its_schedule_does_not_fit(schedule):
    alone = plan_of("pipeline.schedule=1f1b", offload=False)
    full, costs = peak_bytes(alone.schedule(), alone.costs), alone.costs
    least = max(stage.activation_bytes for stage in costs.stages)
    cap = int(max(0.6 * full, 1.05 * least))
    plan = plan_of(f"pipeline.schedule={schedule}", cap_bytes=cap)
    assert peak_bytes(plan.schedule(), plan.costs) <= cap < full
    assert schedule == "auto" or Op.OFFLOAD in plan.schedule().ops
    assert Op.OFFLOAD not in plan_of(f"pipeline.schedule={schedule}", cap_bytes=int(2 * full)).schedule().ops


def test_a_plan_whose_microbatch_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"memory_cap_bytes=1000: rank . needs .* alone, .* pipeline.recompute=layers"):
        plan_of("pipeline.schedule=1f1b", cap_bytes=1000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.tensor=2"], "parallel.tensor=2"),
        (["parallel.context=2"], "parallel.context=2"),
        (["comm.cell=2"], "comm.cell=2"),
        (["zero.stage=3"], "zero.stage=3"),
        (["pipeline.adapt=true"], "pipeline.adapt=true"),
        (["pipeline.recompute=auto"], "pipeline.recompute=auto does not weigh it"),
        (["pipeline.pairs=always"], "pipeline.pairs=always keeps strand pairs"),
        (["pipeline.memory_cap_bytes=0"], "pipeline.memory_cap_bytes=0 is no cap"),
        (["pipeline.schedule=dualpipev"], "pipeline.schedule=dualpipev is not supported"),
    ],
)
def test_unsupported_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=f"pipeline.offload=true: .*{message}"):
        check(compose(["pipeline.offload=true", "pipeline.memory_cap_bytes=1000000", *settings]))


@pytest.mark.timeout(200)
def test_losses_are_equal_bit_for_bit_with_offload():
    """1F1B, and split backwards of virtual stages on a fold."""
    kinds = (
        {"schedule": "1f1b", "offload_cap": 3_000_000},
        {"schedule": "zbv", "placement": "fold", "offload_cap": 4_500_000},
    )
    configs = []
    for kind in kinds:
        configs += [tiny_config(**kind | {"offload_cap": 0}, layers=4), tiny_config(**kind, layers=4)]
        plan = plan_run(configs[-1], facts_of(configs[-1], load_hf_config(configs[-1].model)))
        assert Op.OFFLOAD in plan.schedule().ops
    results = run_ranks(2, many_losses, configs, 3, timeout_s=180)
    assert results[0] == results[1]
    assert results[0][0] == results[0][1] and results[0][2] == results[0][3]
