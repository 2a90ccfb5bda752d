"""An agent starts ranks, notices their ends, and leaves nothing behind, whoever ends."""

import asyncio
import os
import shutil
import signal

import msgspec
import psutil
import pytest

from tests.engine.supervision.agent.agent_bed import LIMIT_S, NOTHING_YET, TARGET, gone, started_agent, until
from weft.engine.supervision.progress_page import Ownership, make_page, page_path

"""The driver's answer to an agent that has connected, and whose ranks are not needed yet."""


async def test_ranks_get_their_environment_and_their_ends_are_reported(tmp_path):
    async with started_agent(tmp_path) as bed:
        bed.want(1, [4, 5, 6], "exit0", "5:exit7", "6:raise")
        await until(lambda: bed.codes(1) == {4: 0, 5: 7, 6: 1})
        facts = bed.facts(1, 5)
        assert facts.pop("pid") and facts.pop("argv") == [TARGET, str(tmp_path), "exit0", "5:exit7", "6:raise"]
        assert facts == {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "9",
            "LOCAL_WORLD_SIZE": "3",
            "WEFT_ATTEMPT": "1",
            "MASTER_ADDR": "m",
            "MASTER_PORT": "5",
            "SECRET": "s",
        }
        ends = bed.reports[-1]["ends"]
        await until(lambda: any(report["report"]["vitals"].get("patterns") for report in bed.reports))
        assert set(ends) == {"5", "6"} and ends["5"]["status"] == 7
        assert "RuntimeError: a rank failed" in bed.reports[-1]["lines"]["6"]
        lines = [line for report in bed.reports for line in report["report"]["vitals"].get("patterns", [])]
        assert lines == [[6, "crash", "Segmentation fault"]]
        bed.server.send(bed.order.peer, {"end": True})
        printed, _ = await asyncio.to_thread(bed.agent.communicate)
        assert b"rank 4 does exit0" in printed and b"and says so" in printed  # ranks write at the same time
        log = tmp_path / "supervisor" / "logs" / "attempt1" / "rank4.log"
        assert sorted(log.read_text().splitlines()) == ["and says so", "rank 4 does exit0"]
        assert bed.agent.returncode == 0 and not page_path(tmp_path, "here").exists()


@pytest.mark.parametrize("replaced", [False, True])
async def test_an_agent_that_has_been_replaced_leaves_its_successor_what_is_in_memory(tmp_path, replaced):
    """As after a cut in which the driver has given it up, and started another on the same host."""

    async with started_agent(tmp_path) as bed:
        bed.want(1, [4], "exit0")
        await until(lambda: bed.codes(1) == {4: 0})
        page = page_path(tmp_path, bed.order.host)
        memory = page.with_name(f"{page.name}.memory{bed.order.launch}")
        memory.mkdir(exist_ok=True)
        bed.server.send(bed.order.peer, {"end": True, "replaced": replaced})
        await until(lambda: bed.agent.poll() is not None)
        assert page.exists() == memory.exists() == replaced


async def test_an_agent_that_is_not_wanted_touches_nothing_of_its_host(tmp_path):
    """As one that was started while the way to its host was cut, where the host's own is heard again first."""
    page = page_path(tmp_path, "here")
    make_page(page, 3)
    before = page.stat().st_ino

    async with started_agent(tmp_path, answer={"end": True, "replaced": True}, preload=["nowhere"]) as bed:
        printed, _ = await asyncio.to_thread(bed.agent.communicate)
        assert bed.agent.returncode == 0 and not printed and not bed.reports
        assert page.stat().st_ino == before and list(page.parent.glob(f"{page.name}*")) == [page]


@pytest.mark.parametrize(("dies", "yields_s"), [(False, 0.3), (True, 10 * LIMIT_S)])
async def test_an_agent_lets_one_that_is_alive_come_back_first(tmp_path, dies, yields_s):
    page = page_path(tmp_path, "here")
    make_page(page, 3)
    other = Ownership(page)

    before = page.stat().st_ino
    async with started_agent(tmp_path, answer=None, yields_s=yields_s) as bed:
        await until(lambda: bed.server.connected)
        if dies:
            await asyncio.sleep(0.5)
            assert not bed.reports
            other.release()
        await until(lambda: bed.reports)
        assert bed.codes(0) == {} and page.stat().st_ino == before
        bed.server.send(bed.order.peer, NOTHING_YET)
        await until(lambda: bed.reports[-1]["ready"])
        assert page.stat().st_ino != before


async def test_an_agent_says_when_ranks_can_start(tmp_path):
    async with started_agent(tmp_path, preload=["torch"]) as bed:
        await until(lambda: bed.reports and bed.reports[-1]["ready"])
        assert not bed.reports[0]["ready"]


async def test_another_attempt_begins_when_the_ranks_of_the_last_have_ended(tmp_path):
    async with started_agent(tmp_path) as bed:
        await bed.run_waiting(1, [0, 1])
        pids = [bed.facts(1, rank)["pid"] for rank in (0, 1)]
        os.kill(pids[0], signal.SIGSTOP)
        await until(lambda: psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED)
        bed.want(1, [0, 1], run=False)
        await until(lambda: bed.codes(1) is not None and None not in bed.codes(1).values())
        assert bed.codes(1)[0] == -signal.SIGKILL
        bed.want(2, [7], "wait")
        bed.want(1, [0, 1], "wait")  # late: it changes nothing
        await until(lambda: bed.written(2, 7))
        assert all(map(gone, pids))
        await until(lambda: bed.codes(2) == {7: None})
        assert bed.facts(2, 7)["LOCAL_RANK"] == "0"


async def test_the_same_order_twice_starts_nothing_twice(tmp_path):
    async with started_agent(tmp_path) as bed:
        await bed.run_waiting(1, [0])
        pid = bed.facts(1, 0)["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: bed.codes(1) == {0: -signal.SIGKILL})
        (tmp_path / "1.0").unlink()
        bed.want(1, [0], "wait")
        seen = len(bed.reports)
        await until(lambda: len(bed.reports) > seen + 3)
        assert not bed.written(1, 0) and bed.codes(1) == {0: -signal.SIGKILL}


async def test_survivors_keep_their_process_and_the_others_are_new(tmp_path):
    async with started_agent(tmp_path) as bed:
        bed.want(1, [0, 1, 2], "wait", "0:park", "1:park")
        await until(lambda: bed.written(1, 0, 1, 2))
        bed.want(1, [0, 1, 2], run=False, drop=[1])
        await until(lambda: bed.codes(1) == {0: None, 1: -signal.SIGTERM, 2: -signal.SIGTERM})
        await until(lambda: bed.reports[-1]["standby"] == {"0": "asked"})
        bed.want(2, [0, 1], "wait", drop=[1])
        await until(lambda: bed.written(2, 0, 1))
        assert bed.facts(2, 0)["pid"] == bed.facts(1, 0)["pid"] and bed.facts(2, 1)["pid"] != bed.facts(1, 1)["pid"]
        assert bed.facts(2, 0)["LOCAL_WORLD_SIZE"] == "2"
        bed.want(2, [0, 1], run=False)
        await until(lambda: bed.codes(2) == {0: -signal.SIGTERM, 1: -signal.SIGTERM})


async def test_an_exit_code_of_0_in_the_middle_of_training_is_no_success(tmp_path):
    async with started_agent(tmp_path) as bed:
        bed.want(1, [0, 1], "early", "1:exit0")
        await until(lambda: bed.codes(1) == {0: 1, 1: 0})
        (end,) = bed.reports[-1]["ends"].values()
        assert end["kind"] == "other" and "exit code 0 in step 18" in end["message"]


@pytest.mark.parametrize("by", ["driver", "signal"])
async def test_ranks_that_are_asked_to_stop_have_the_time_to_save(tmp_path, by):
    async with started_agent(tmp_path) as bed:
        bed.want(1, [0, 1], "save")
        await until(lambda: (tmp_path / "0.ready").exists() and (tmp_path / "1.ready").exists())
        if by == "driver":
            bed.want(1, [0, 1], "save", stop=15)
        else:
            bed.agent.terminate()
        await until(lambda: bed.codes(1) == {0: 143, 1: 143})
        assert {end["kind"] for end in bed.reports[-1]["ends"].values()} == {"stopped"}
        assert bed.reports[-1]["leaving"] == (by == "signal")


async def test_an_agent_that_takes_the_host_of_a_stopped_one_ends_it_and_its_ranks(tmp_path):
    """They would hold the run's folder against the ranks of the next attempt."""

    async with started_agent(tmp_path) as bed:
        await bed.run_waiting(1, [0, 1])
        stopped = bed.agent
        ranks = [bed.facts(1, rank)["pid"] for rank in (0, 1)]
        stopped.send_signal(signal.SIGSTOP)
        bed.order = msgspec.structs.replace(bed.order, generation=2)
        bed.start()
        assert await asyncio.to_thread(stopped.wait, LIMIT_S) == -signal.SIGKILL
        await until(lambda: all(map(gone, ranks)))
        await bed.run_waiting(2, [0, 1])


async def test_a_stopped_forkserver_goes_on(tmp_path):
    async with started_agent(tmp_path) as bed:
        await until(lambda: bed.reports)
        (forkserver,) = psutil.Process(bed.agent.pid).children()
        forkserver.suspend()
        await bed.run_waiting(1, [0])


async def test_ranks_start_though_somebody_has_removed_the_folder_in_shared_memory(tmp_path):
    async with started_agent(tmp_path) as bed:
        await bed.run_waiting(1, [0])
        page = page_path(tmp_path, "here")
        for path in page.parent.glob(f"{page.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        bed.want(2, [0], "early")
        await until(lambda: bed.codes(2) == {0: 1})
        assert page.exists()


async def test_a_file_system_that_hangs_does_not_hold_up_the_heartbeat(tmp_path):
    """Opening a pipe without a reader blocks, as opening a file does while storage is away."""
    log = tmp_path / "supervisor" / "logs" / "attempt1" / "rank0.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)

    async with started_agent(tmp_path) as bed:
        await bed.run_waiting(1, [0])
        before = len(bed.reports)
        await until(lambda: len(bed.reports) > before + 3)
