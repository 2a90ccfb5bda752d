"""A run whose numbers are no longer finite ends with one clear error, and what was good stays."""

import pytest

from tests.engine.tiny import tiny_config
from tests.engine.zero.astray import go_astray
from tests.interpreter import python
from tests.quickstart import TINY_QUICKSTART
from weft.engine.checkpoint import newest
from weft.tools.ranks import run_ranks


def config(clip, **keywords):
    made = tiny_config(**keywords)
    made.optimizer.clip = clip
    return made


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_rank_stops_at_the_same_step_and_good_weights_stay(tmp_path):
    """With and without clipping, over stages and over replicas, in fp32 and bf16, at ZeRO 0, 1 and 3."""
    configs = [
        config(0.5, stages=2),
        config(0.0, stages=2),
        config(0.0, stages=1, zero=3, layers=2),
        config(0.5, stages=1, zero=1, layers=2, precision="bf16"),
    ]
    for found in run_ranks(2, go_astray, configs, str(tmp_path), timeout_s=280):
        for number, run in enumerate(found):
            trained, saved, exported = run["errors"]
            assert "the norm of the gradient is" in trained and "smaller optimizer.lr" in trained, (number, trained)
            assert int(trained.split(":")[0].removeprefix("step ")) > 2
            assert saved and exported, number
            assert run["folders"] == [run["checkpoint"]] == ["step-00000002"]
            assert run["steps"] == 2
            assert run["export is as it was"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_ends_with_its_exit_code(tmp_path):
    settings = [*TINY_QUICKSTART, "pipeline.stages=1", "pipeline.schedule=1f1b", "pipeline.placement=straight"]
    settings += ["optimizer.lr=1e18", "optimizer.warmup_steps=2", "train.steps=9", "checkpoint.every=1"]
    done = python("-m", "weft.recipes.train", *settings, f"train.output_dir={tmp_path}", timeout_s=280)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "the norm of the gradient is" in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    kept = newest(tmp_path / "quickstart" / "checkpoints")
    assert kept is not None and kept.name != "step-00000009"
    assert not (tmp_path / "quickstart" / "export").exists()
