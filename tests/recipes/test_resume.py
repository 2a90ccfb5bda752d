"""A run that is killed goes on as if it had not been."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

STEPS = 14
SETTINGS = [
    "recipe=quickstart",
    f"train.steps={STEPS}",
    "train.export=false",
    "train.sample=",
    "train.timeline=false",
    "model.self_check=false",
    "model.overrides.hidden_size=32",
    "model.overrides.intermediate_size=64",
    "model.overrides.num_hidden_layers=4",
    "data.sequence_length=32",
    "checkpoint.every=2",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _launch(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "weft.tools.cli", "launch", *SETTINGS, f"train.output_dir={folder}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _losses(folder: Path) -> dict[int, float]:
    """Loss by step; a step that was repeated counts as it was last."""
    path = folder / "quickstart" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def _ranks(launcher: subprocess.Popen) -> list[psutil.Process]:
    family = psutil.Process(launcher.pid).children(recursive=True)
    return [process for process in family if any("--local_rank=" in part for part in process.cmdline())]


def _wait_for(launcher: subprocess.Popen, happened) -> None:
    deadline = time.monotonic() + 200
    while not happened():
        assert launcher.poll() is None, launcher.stderr.read()[-3000:]
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.01)


def _kill(launcher: subprocess.Popen, rank: int) -> None:
    """SIGKILL one rank; the launcher must end all others by itself."""
    ranks = _ranks(launcher)
    os.kill(ranks[rank % len(ranks)].pid, signal.SIGKILL)
    launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert not [process for process in ranks if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_killed_runs_resume_exactly(tmp_path):
    whole = _launch(tmp_path / "whole")
    _, errors = whole.communicate(timeout=300)
    assert whole.returncode == 0, errors[-3000:]
    expected = _losses(tmp_path / "whole")
    assert sorted(expected) == list(range(1, STEPS + 1))

    folder = tmp_path / "killed"
    checkpoints = folder / "quickstart" / "checkpoints"
    rng = random.Random()
    at = rng.randint(1, 7)
    launcher = _launch(folder)
    _wait_for(launcher, lambda: at in _losses(folder))
    _kill(launcher, rng.randrange(4))

    # Once more, while a checkpoint is being written: its folder has a name of its own until it is whole.
    known = set(checkpoints.iterdir()) if checkpoints.exists() else set()
    launcher = _launch(folder)
    _wait_for(launcher, lambda: checkpoints.exists() and set(checkpoints.iterdir()) - known)
    _kill(launcher, rng.randrange(4))

    launcher = _launch(folder)
    _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, errors[-3000:]
    assert _losses(folder) == expected, f"killed at step {at}"
