"""Tests of a driver's use of a run's folder: layouts with their own configurations, deny-list, newest checkpoint."""

import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.interpreter import python
from tests.waiting import until
from weft.conf import load
from weft.conf.batch import num_replicas
from weft.conf.host.private import write_private
from weft.conf.hosts import world_size
from weft.conf.trees import to_yaml
from weft.engine.supervision.agent.output import Writer, stderr_on_thread
from weft.engine.supervision.driver.driver import Driver, _own_address
from weft.engine.supervision.driver.files import JOURNAL, Spec, config_file, read_journal


@pytest.fixture
def driver(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("left slots=2\nright slots=2\nspare slots=2\n")
    config = load(
        [
            f"cluster.hostfile={hostfile}",
            "cluster.manager=local",
            "cluster.spares=[spare]",
            "pipeline.stages=2",
            "pipeline.microbatches=4",
            f"train.output_dir={tmp_path}",
            "train.name=run",
        ]
    )
    folder = tmp_path / "run"
    write_private(config_file(folder), to_yaml(config))
    Spec("a:b", [], {}).write(folder)
    return Driver(folder, attach=False)


def batch(layout):
    """Ranks, micro-batches of a step over all replicas, and the rest of the arguments."""
    option, file, *rest = layout.arguments
    assert option == "--config-file"
    config = load([], recipe_file=file)
    assert world_size(config.cluster) == layout.num_ranks
    replicas = num_replicas(config, layout.num_ranks)
    return layout.num_ranks, replicas * config.pipeline.microbatches * config.train.microbatch_size, rest


def test_layouts_keep_the_batch(driver):
    first = driver._layout(1, set(), None)
    assert dict(first.slots) == {"left": 2, "right": 2} and batch(first) == (4, 8, [])
    second = driver._layout(2, {"right"}, first.slots)
    assert dict(second.slots) == {"left": 2, "spare": 2} and batch(second) == (4, 8, [])
    third = driver._layout(3, {"right", "spare"}, second.slots)
    assert dict(third.slots) == {"left": 2} and batch(third) == (2, 8, [])
    with pytest.raises(ValueError, match="no hosts to go on with"):
        driver._layout(4, {"left", "right", "spare"}, third.slots)


def test_later_attempts_resume_from_what_the_run_has_saved(driver, tmp_path):
    first = driver._layout(1, set(), None)
    for step in (4, 12, 8):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert driver.newest_checkpoint() == "step-00000012"
    assert driver._layout(2, set(), first.slots) == first, "ranks need not read the same settings again"
    driver._config.checkpoint.resume, driver._laid_out = "never", None
    assert batch(driver._layout(2, set(), first.slots))[2] == ["checkpoint.resume=auto"]


def test_of_the_deny_list_this_run_heeds_its_own_hosts(driver, tmp_path, capsys):
    driver._deny_list.evict("right", "by hand")
    driver._deny_list.evict("elsewhere", "by hand")
    assert driver.denied() == {"right": "by hand"}
    driver.deny("left", "weft doctor node: GEMM")
    assert set(driver.denied()) == {"left", "right"}
    driver._deny_list.path.write_text("garbage")
    driver.job.fleet.away["left"] = "before"
    assert driver.denied() == {"left": "before"} and "cannot be read" in capsys.readouterr().err


DIES = """if True:
    import os, signal, sys
    from pathlib import Path
    from weft.engine.supervision.driver import driver
    from weft.engine.supervision.driver.managers import starters
    dies = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    owner, name = {"launch": (driver, "hostfile_text"), "agent": (starters, "_start")}[sys.argv[2]]
    setattr(owner, name, dies)
    driver.drive(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("moment", ["launch", "agent"])
def test_a_driver_that_dies_before_its_first_agent_has_started_is_replaced(driver, tmp_path, moment):
    """It dies when the last event of the journal is its own start, or that of the agent of the first host."""
    folder = tmp_path / "run"
    driver._lock.release()
    Spec("tests.engine.supervision.agent.fake_ranks:done", ["tests.engine.supervision.agent.fake_ranks"], {}).write(
        folder
    )
    process = python("-c", DIES, folder, moment, timeout_s=60)
    assert process.returncode == -signal.SIGKILL

    def events():
        return [event["event"] for event in read_journal(folder / JOURNAL)]

    until(lambda: "end" in events(), explain=events)
    assert events().count("driver") == 2 and events().count("launch") == 2


def opened(pipe):
    """Let storage answer: open a pipe for its reader, and write nothing."""
    os.close(os.open(pipe, os.O_WRONLY))


@pytest.fixture
def plan(tmp_path):
    """A plan in storage that hangs, like opening a pipe without a writer."""
    os.mkfifo(tmp_path / "run" / "plan.json")
    return tmp_path / "run" / "plan.json"


def test_a_layout_on_storage_that_hangs_is_refused_until_storage_answers(driver, plan):
    slots = {"left": 2, "right": 2}
    for _ in range(2):
        with pytest.raises(ValueError, match="storage has not answered for 1 s"):
            driver._layout(2, {"right"}, slots)
    opened(plan)
    driver._storage._last[1].result()
    assert dict(driver._layout(2, {"right"}, slots).slots) == {"left": 2, "spare": 2}


def test_schedule_rows_are_read_when_storage_answers(driver, plan, capsys):
    for _ in range(2):
        with pytest.raises(TimeoutError):
            driver.rows()
    assert not capsys.readouterr().err
    opened(plan)
    driver._storage._last[1].result()
    assert driver.rows() is None and "not a plan" in capsys.readouterr().err, "it is empty"


def test_an_adaptive_run_s_plan_is_followed(driver, tmp_path):
    times = [driver.plan_time()]
    for adapts in (False, True, True):
        driver._config.pipeline.adapt = adapts
        times.append(driver.plan_time())
        (tmp_path / "run" / "plan.json").write_text("{}")
    assert times[:3] == [0, 0, times[2]] and 0 < times[2] < times[3]


def test_stored_calls_that_cannot_be_read_hold_up_no_diagnosis(driver, tmp_path, monkeypatch):
    assert driver.differing_calls(10.0) == ""

    def fail(*_):
        raise RecursionError

    monkeypatch.setattr("weft.tools.watch.desync.stored_difference", lambda *_: "all_reduce 3 differs")
    assert driver.differing_calls(10.0) == "all_reduce 3 differs"
    monkeypatch.setattr("weft.tools.watch.desync.stored_difference", fail)
    assert driver.differing_calls(10.0) == ""


def test_a_deny_list_that_hangs_holds_up_no_driver(driver, capsys, monkeypatch):
    monkeypatch.setattr("weft.engine.supervision.driver.files.read_text", Path.read_text)  # a pipe would be refused
    os.mkfifo(driver._deny_list.path)
    driver.deny("right", "weft doctor node: GEMM")
    assert "right is left out of this run alone: [Errno 110] storage has not answered" in capsys.readouterr().err
    assert driver.denied() == {}
    opened(driver._deny_list.path)


def test_a_terminal_that_hangs_holds_up_no_driver(monkeypatch):
    """A full pipe without a reader blocks like a log file on storage that hangs."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        patch.setattr(Writer.close, "__defaults__", (0.1,))
        with stderr_on_thread():
            for _ in range(100):
                print("x" * 4000, file=sys.stderr)
                logging.getLogger("weft").error("y")
        assert sys.stderr is full
    os.close(reading)


def test_a_run_that_has_ended_is_not_attached_to(driver, tmp_path):
    driver.record("launch")
    driver.record("end", code=0, reason="done")
    driver._lock.release()
    with pytest.raises(ValueError, match="the run has ended"):
        Driver(tmp_path / "run", attach=True)


def test_where_a_driver_listens():
    assert _own_address(["localhost", "127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(ValueError, match="no-such-host"):
        _own_address(["localhost", "no-such-host.invalid"])
