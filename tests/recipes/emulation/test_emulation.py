"""Real ranks in rotation among emulated ones, with the unchanged engine and DeepSpeed."""

import pytest

from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.weft_engine import LayersJob
from weft.comm.emulated.operation_log import EmulationError, Mismatch
from weft.conf.schema import CommConfig, PipelineConfig, PlacementKind, ScheduleKind, WeftConfig
from weft.pipeline.costs import LinkCost
from weft.pipeline.simulation import simulate
from weft.recipes.emulation.classes import representatives
from weft.recipes.emulation.command import check_rank
from weft.recipes.emulation.session import Setting
from weft.recipes.emulation.turns import emulate
from weft.recipes.emulation.what_if import WhatIf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
WORK = EmulatedWork(forward_s=0.004, input_s=0.004, weight_s=0.004, hidden_bytes=2**12, weight_elements=1000)
LINK = LinkCost(latency_s=1e-6, bandwidth_bps=1e10)


def job(tmp_path, replicas, *, placement="straight", kind="1f1b", zero=1, sites=(), microbatches=4):
    case = EngineCase(
        num_ranks=4,
        num_layers=8,
        num_microbatches=microbatches,
        num_replicas=replicas,
        work=WORK,
        sites=sites,
        wan=LinkCost(latency_s=0.01, bandwidth_bps=1e8),
    )
    pipeline = PipelineConfig(
        stages=4, schedule=ScheduleKind[kind], placement=PlacementKind[placement], microbatches=microbatches
    )
    config = WeftConfig(pipeline=pipeline, comm=CommConfig(timeout_s=60.0))
    config.zero.stage = zero
    config.data.cache_dir = str(tmp_path)
    return LayersJob(case, config)


def setting(**what_if):
    delays = what_if.pop("delays", "simulate")
    return Setting(delays=delays, per_host=8, inside=LINK, between=LINK, what_if=WhatIf(**what_if))


@pytest.mark.parametrize(
    ("kind", "placement", "zero", "at_once"), [("1f1b", "straight", 1, 1), ("w", "fold", 3, 3)]
)  # side by side as well: layers that sleep need no core
def test_a_large_job_takes_what_its_schedule_does(tmp_path, kind, placement, zero, at_once):
    work = job(tmp_path, 2500, kind=kind, placement=placement, zero=zero, microbatches=8)
    found = emulate(work, 10_000, setting(), steps=2, most=3, at_once=at_once)
    assert [len(each.ranks) for each in found.classes] == [2500] * 4
    assert len({each.pipeline_rank for each in found.real}) == len(found.turns) == 3
    assert all(turn.peak_bytes > 0 for turn in found.turns)
    placed = found.plan.placement
    ideal = simulate(found.plan.schedule(), WORK.costs(8, placed.num_stages)).step_s
    assert found.step_s > ideal  # layers sleep at least that long
    assert all(stage.forward_s >= WORK.forward_s * 8 / placed.num_stages for stage in found.costs.stages)


def test_what_is_different_changes_the_step_of_ranks_that_wait(tmp_path):
    work = job(tmp_path, 2)
    usual = emulate(work, 8, setting(), steps=2, real=[3])
    slow = emulate(work, 8, setting(slow={1: 0.1}), steps=2, real=[3])
    ideal = WORK.costs(8, 4).stages[0]
    assert slow.step_s > 4 * 10 * ideal.forward_s  # rank 1 hands four micro-batches to rank 3
    assert slow.step_s > usual.step_s
    ready = emulate(work, 8, setting(delays="alpha-beta"), steps=2, real=[3])
    assert ready.step_s > 4 * (ideal.forward_s + ideal.input_s + ideal.weight_s)


def test_a_rank_that_was_started_otherwise_is_found_and_both_ranks_are_named(tmp_path):
    right, wrong = job(tmp_path, 256), job(tmp_path, 256, microbatches=5)
    with pytest.raises(
        Mismatch, match=r"^rank 737 executes .*, where rank \d+ expects .*; rank 737 was started with pipeline.micro"
    ):
        check_rank(right, wrong, 737, 1024, setting(), "pipeline.microbatches=5")
    check_rank(right, right, 737, 1024, setting(), "nothing")


def test_a_model_that_fails_in_a_step_ends_the_emulation_with_one_error(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        "from weft.recipes.emulation.delays import DelayModel\n"
        "class Fails(DelayModel):\n    def late_s(self, message): raise OSError('no such link')\n"
    )
    with pytest.raises(EmulationError, match="late_s raised OSError: no such link"):
        emulate(job(tmp_path, 2), 8, setting(delays=f"{file}:Fails"), steps=1, real=[1])


def test_sites_are_classes_of_their_own(tmp_path):
    found = emulate(job(tmp_path, 4, sites=(2, 2)), 16, setting(), steps=1, real=[5])
    assert [each.pipeline_rank for each in found.classes] == [0, 1, 2, 3]
    assert len({each.kind for each in found.classes}) == 4  # first, before the WAN, behind it, last
    assert len(representatives(found.classes, 4)) == 4
    with pytest.raises(EmulationError, match="--most 2: ranks are of 4 kinds"):
        representatives(found.classes, 2)
    assert found.step_s > 0.02  # a micro-batch goes over the WAN and its gradient comes back
