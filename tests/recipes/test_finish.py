"""Tests of the files of a finished run."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from weft.conf.schema import WeftConfig
from weft.engine.stages.files.exporting import ExportStorageError
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.pipeline.profile import fit_costs, load_costs
from weft.pipeline.simulation import simulate
from weft.recipes import finish


def test_the_costs_of_a_run_can_be_planned_with(tmp_path):
    schedule = generate("1f1b", Placement.straight(2), 4)
    unit = CostModel.unit(2)
    costs = replace(unit, stages=tuple(replace(stage, send_s=0.25) for stage in unit.stages))
    measured = simulate(schedule, costs)
    engine = SimpleNamespace(
        plan=SimpleNamespace(costs=unit, predicted=lambda costs: simulate(schedule, costs)),
    )
    drawn = finish.draw_timeline(engine, [measured] * 3, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"costs.yaml", "timeline.json", "timeline.png"}
    assert load_costs(tmp_path / "costs.yaml", 2) == fit_costs([measured], unit) == costs
    assert "measured 15.750 s, predicted 15.750 s" in drawn


def test_a_run_succeeds_if_its_sample_and_its_timeline_fail(tmp_path, monkeypatch, capsys):
    """A prompt with the tokens to sample may be longer than a model reads, and the disk may be full."""

    def fail(*_, **__):
        raise IndexError("index out of range in self")

    for name in ("sample", "draw_timeline"):
        monkeypatch.setattr(finish, name, fail)
    monkeypatch.setattr(finish, "export", lambda *_, **__: None)
    monkeypatch.setattr(finish, "dist", SimpleNamespace(barrier=lambda: None, get_rank=lambda: 0))
    config = WeftConfig()
    config.train.export, config.train.sample, config.train.timeline = True, "a prompt", True
    finish.finish(config, SimpleNamespace(global_rank=0, correct_measurements=lambda: [None]), None, tmp_path)
    printed = capsys.readouterr().out
    for name in ("sample", "timeline"):
        assert f"{name}: none (IndexError: index out of range in self)" in printed


@pytest.mark.parametrize("limit_s", [3600.0, 0.0])
def test_an_export_waits_for_a_full_disk_as_the_last_checkpoint_does(tmp_path, monkeypatch, capsys, limit_s):
    attempts = list[int]()

    def export(*_, **__):
        attempts.append(1)
        if len(attempts) < 4:
            raise ExportStorageError("export: No space left on device")

    monkeypatch.setattr(finish, "export", export)
    monkeypatch.setattr(finish, "RETRY_S", 0.01)
    monkeypatch.setattr(finish, "has_rank_0", lambda is_over, device: is_over)
    monkeypatch.setattr(finish, "dist", SimpleNamespace(barrier=lambda: None, get_rank=lambda: 0))
    config = WeftConfig()
    config.train.export, config.train.timeline, config.train.sample = True, False, ""
    config.checkpoint.storage_wait_s = limit_s
    engine = SimpleNamespace(global_rank=0, device="cpu", correct_measurements=list)
    refused = pytest.raises(ExportStorageError) if not limit_s else nullcontext()
    with refused:
        finish.finish(config, engine, None, tmp_path)
    assert len(attempts) == (4 if limit_s else 1)
    if limit_s:
        line = "No space left on device; the export is tried again every 0.01 s until checkpoint.storage_wait_s=3600 is"
        assert line in capsys.readouterr().out
