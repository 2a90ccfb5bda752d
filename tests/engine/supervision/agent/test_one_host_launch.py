"""`weft launch` on one host: what is left when a rank, or the launch itself, is killed; where inputs are checked."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.quickstart import TINY_QUICKSTART
from tests.waiting import until
from weft.engine.supervision.agent.forkserver import EarlyAgent

LIMIT_S = 240.0
SETTINGS = [*TINY_QUICKSTART, "pipeline.stages=2", "cluster.ranks=2", "train.steps=100000", "logging.every=1"]


class Launched:
    """A run that trains; its output and its processes."""

    def __init__(self, folder):
        command = [sys.executable, "-m", "weft.tools.cli", "launch", *SETTINGS, f"train.output_dir={folder}"]
        self.log = folder / "log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until((folder / "quickstart" / "metrics.jsonl").exists, LIMIT_S, explain=self.log.read_text)
        (self.agent,) = psutil.Process(self.process.pid).children()
        (self.forkserver,) = self.agent.children()
        self.ranks = self.forkserver.children()

    def all_gone(self):
        return not any(map(runs, [self.agent, self.forkserver, *self.ranks]))


def runs(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_rank_killed_by_a_signal_is_named_and_its_peers_complaints_are_not_printed(tmp_path):
    run = Launched(tmp_path)
    assert len(run.ranks) == 2
    os.kill(run.ranks[1].pid, signal.SIGKILL)
    assert run.process.wait(LIMIT_S) == 1
    assert run.all_gone()
    printed = run.log.read_text()
    assert printed.count("killed by SIGKILL") == 1 and "rank " in printed.splitlines()[-1]
    assert "Connection" not in printed and "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_killed_launch_leaves_no_process(tmp_path):
    run = Launched(tmp_path)
    run.process.kill()
    run.process.wait()
    until(run.all_gone, LIMIT_S, explain=run.log.read_text)


def test_inputs_are_checked_in_the_process_that_has_the_imports(tmp_path):
    agent = EarlyAgent(os.environ, ["tests.engine.supervision.agent.fake_checks"])
    try:
        assert agent.run("tests.engine.supervision.agent.fake_checks:run", [str(tmp_path / "a"), "0"]) == 0
        assert agent.run("tests.engine.supervision.agent.fake_checks:run", [str(tmp_path / "b"), "2"]) == 2
        assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text(), "the module was imported once"
    finally:
        agent.close()
    assert agent.process.poll() is not None


def test_imports_that_fail_end_the_launch(capfd):
    agent = EarlyAgent(os.environ, ["tests.tools.no_such_module"])
    try:
        assert agent.run("tests.engine.supervision.agent.fake_checks:run", []) == 1
        assert "no_such_module" in capfd.readouterr().err
    finally:
        agent.close()
