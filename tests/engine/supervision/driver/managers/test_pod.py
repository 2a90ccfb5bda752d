"""Pods: an order in the shared folder becomes an agent, a newer one the next, and a run trains on them."""

import subprocess
import sys
import threading

import psutil
import pytest

from tests.recipes.runs import prepare
from tests.waiting import until
from weft.conf import load
from weft.engine.supervision.agent.forkserver import PRELOAD, TARGET
from weft.engine.supervision.driver import driver
from weft.engine.supervision.driver.files import JOURNAL, Spec, config_file, read_journal
from weft.engine.supervision.driver.managers import kubernetes as pod
from weft.engine.supervision.driver.managers.kubernetes import PodStarter, command_file
from weft.engine.supervision.messages import AgentCommand
from weft.tools.launch import write_config

LIMIT_S = 240.0


@pytest.fixture
def start_pod():
    started = []

    def start(folder, host):
        started.append(subprocess.Popen([sys.executable, "-m", pod.__name__, str(folder), host]))
        return started[-1]

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def command(folder, generation):
    return AgentCommand(
        host="a",
        generation=generation,
        address="weft-test-no-driver-here",
        run_folder=str(folder),
        slots=1,
        preload=[],
        environment={},
        heartbeat_s=1.0,
        orphan_s=600.0,
    )


def agents(process):
    """Agents that a pod has started."""
    return [child.pid for child in psutil.Process(process.pid).children() if child.status() != psutil.STATUS_ZOMBIE]


def test_agents_come_and_go_by_orders(tmp_path, start_pod):
    process = start_pod(tmp_path, "a")
    first = PodStarter().start(command(tmp_path, 1))
    assert command_file(tmp_path, "a").stat().st_mode & 0o777 == 0o600
    (one,) = until(lambda: agents(process), LIMIT_S)
    assert first.poll() is None
    second = PodStarter().start(command(tmp_path, 2))
    until(lambda: agents(process) not in ([one], []), LIMIT_S)
    assert not psutil.pid_exists(one)
    second.kill()
    until(lambda: not agents(process), LIMIT_S)
    assert second.poll() == 0 and process.poll() is None


def test_a_folder_that_hangs_holds_up_no_start_of_an_agent(tmp_path, monkeypatch):
    answers, written = threading.Event(), []
    monkeypatch.setattr(pod, "write_private", lambda path, text: answers.wait(60) and written.append(path.name))
    starter = PodStarter()
    for generation in (1, 2):
        with pytest.raises(OSError, match="storage has not answered for 1 s"):
            starter.start(command(tmp_path, generation))
    answers.set()
    starter._storage._last[1].result()
    assert starter.start(command(tmp_path, 3)).poll() is None and written == ["a.json"] * 2


@pytest.mark.slow
def test_a_run_on_pods(tmp_path, start_pod):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("pod0 slots=1\npod1 slots=1\n")
    config = load(
        [
            *prepare(tmp_path),
            "model.arch=llama",
            "cluster.manager=kubernetes",
            f"cluster.hostfile={hostfile}",
            "pipeline.stages=2",
            "train.steps=4",
            "train.name=pods",
        ]
    )
    folder = tmp_path / "runs" / "pods"
    write_config(config, config_file(folder))
    Spec(TARGET, list(PRELOAD), {}).write(folder)
    for host in ("pod0", "pod1"):
        start_pod(folder, host)
    process = subprocess.Popen([sys.executable, "-m", driver.__name__, "launch", str(folder)])
    try:
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
    events = read_journal(folder / JOURNAL)
    assert [event["ranks"] for event in events if event["event"] == "attempt"] == [{"0": "pod0", "1": "pod1"}]
    assert events[-1]["event"] == "end" and events[-1]["code"] == 0
