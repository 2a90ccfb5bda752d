"""A run that is killed goes on as if it had not been."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.quickstart import TINY_QUICKSTART, losses_of, train, train_to_death
from weft.tools.ranks import run_ranks

STEPS = 14
SETTINGS = [*TINY_QUICKSTART, f"train.steps={STEPS}", "checkpoint.every=2"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _launch(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "weft.tools.cli", "launch", *SETTINGS, f"train.output_dir={folder}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _ranks(launcher: subprocess.Popen) -> list[psutil.Process]:
    (agent,) = psutil.Process(launcher.pid).children()
    (forkserver,) = agent.children()
    return forkserver.children()


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
    run_ranks(4, train, SETTINGS, tmp_path / "whole", timeout_s=300)
    expected = losses_of(tmp_path / "whole")
    assert sorted(expected) == list(range(1, STEPS + 1))

    folder = tmp_path / "killed"
    rng = random.Random()
    at = rng.randint(1, 7)
    launcher = _launch(folder)
    _wait_for(launcher, lambda: at in losses_of(folder))
    _kill(launcher, rng.randrange(4))

    # Once more, while a checkpoint is being written; by what forks ranks, as what launches them has been shown.
    with pytest.raises(RuntimeError, match=r"rank \d failed"):
        run_ranks(4, train_to_death, SETTINGS, folder, rng.randrange(4), timeout_s=300)
    assert (folder / "killed").exists()

    run_ranks(4, train, SETTINGS, folder, timeout_s=300)
    assert losses_of(folder) == expected, f"killed at step {at}"
