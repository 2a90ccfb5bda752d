"""An agent and its ranks end with each other, and act without a driver."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from tests.engine.supervision.agent.agent_bed import HOLD, LIMIT_S, gone, started_agent, until
from weft.conf.host.run_lock import RunLock


@contextmanager
def a_tree(bed):
    """The agent's forkserver and ranks, which have to end in the block."""
    processes = psutil.Process(bed.agent.pid).children(recursive=True)
    assert len(processes) == 3
    yield
    psutil.wait_procs(processes, timeout=LIMIT_S)
    assert all(gone(process.pid) for process in processes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_ranks_end_with_their_agent(tmp_path, number):
    async with started_agent(tmp_path) as bed:
        await bed.run_waiting(1, [0, 1])
        with a_tree(bed):
            bed.agent.send_signal(number)


async def test_ranks_end_with_their_forkserver_and_the_agent_has_another(tmp_path):
    async with started_agent(tmp_path) as bed:
        await bed.run_waiting(1, [0, 1])
        (server,) = psutil.Process(bed.agent.pid).children()
        server.kill()
        await until(lambda: bed.codes(1) == {0: -signal.SIGKILL, 1: -signal.SIGKILL})
        await until(lambda: all(gone(bed.facts(1, rank)["pid"]) for rank in (0, 1)))
        bed.want(2, [0], "exit3")
        await until(lambda: bed.codes(2) == {0: 3})


async def test_what_a_rank_has_started_ends_with_it(tmp_path):
    async with started_agent(tmp_path) as bed:
        bed.want(1, [0], "leave")
        await until(lambda: bed.codes(1) == {0: 0})
        await until(lambda: gone(int((tmp_path / "child").read_text())))


async def test_an_agent_without_a_driver_ends_in_time(tmp_path):
    async with started_agent(tmp_path, orphan_s=0.5) as bed:
        await bed.run_waiting(1, [0, 1])
        with a_tree(bed):
            await bed.server.close()
        printed, _ = await asyncio.to_thread(bed.agent.communicate)
        assert b"no driver for" in printed


async def test_the_agent_that_guards_the_driver_starts_it_again(tmp_path):
    mark = tmp_path / "started"

    async with started_agent(tmp_path, driver=["touch", str(mark)]) as bed:
        await until(lambda: bed.reports)
        await bed.server.close()
        await until(mark.exists)


async def test_a_driver_that_is_stopped_is_reported_and_not_replaced(tmp_path):
    mark, lock = tmp_path / "started", tmp_path / "supervisor"
    driver = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)])
    try:
        async with started_agent(tmp_path, driver=["touch", str(mark)], orphan_s=4.0) as bed:
            await until(lambda: bed.reports and RunLock.holder(lock) == driver.pid)
            driver.send_signal(signal.SIGSTOP)
            await bed.server.close()
            printed, _ = await asyncio.to_thread(bed.agent.communicate)
            assert printed.count(b"is stopped by a signal; kill -CONT %d" % driver.pid) == 1
            assert not mark.exists()
    finally:
        driver.kill()
        driver.wait()


async def test_an_agent_without_a_driver_ends_in_time_though_the_lock_of_the_run_hangs(tmp_path):
    async with started_agent(tmp_path, orphan_s=2.0) as bed:
        await until(lambda: bed.reports)
        (tmp_path / "supervisor").mkdir(exist_ok=True)
        os.mkfifo(tmp_path / "supervisor" / "lock")
        await bed.server.close()
        printed, _ = await asyncio.wait_for(asyncio.to_thread(bed.agent.communicate), LIMIT_S)
        assert b"no driver for" in printed


async def test_an_agent_whose_imports_fail_says_so_and_ends(tmp_path):
    async with started_agent(tmp_path, preload=["nowhere"]) as bed:
        printed, _ = await asyncio.to_thread(bed.agent.communicate)
        assert b"No module named 'nowhere'" in printed and bed.agent.returncode == 1


async def test_nothing_secret_is_in_a_command_line(tmp_path):
    async with started_agent(tmp_path, environment={"SECRET": "hidden"}) as bed:
        await bed.run_waiting(1, [0])
        me = psutil.Process(bed.agent.pid)
        for process in (me, *me.children(recursive=True)):
            assert "hidden" not in " ".join(process.cmdline())
        assert bed.facts(1, 0)["SECRET"] == "hidden"
