"""Ranks that leave an attempt wait at their agent, and hear what the next one is; both ends in one process."""

import asyncio
import os
import threading

import pytest

from weft.engine.supervision.agent.processes import Standby
from weft.engine.supervision.messages import Assignment
from weft.engine.supervision.rank.agent_link import AgentLink

LIMIT_S = 20.0


class Rank(threading.Thread):
    """Takes part in attempt 1, leaves on request, and stands by."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.asked, self.heard = path, threading.Event(), "nothing"
        self.start()

    def run(self):
        link = AgentLink.from_environment({"WEFT_AGENT": str(self.path)})
        link.begin(1, self.asked.set)
        self.asked.wait(LIMIT_S)
        assert link.leaving
        self.heard = link.stand_by("a peer was lost")


@pytest.fixture
def lot(tmp_path):
    return tmp_path / "agent"


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


def hosted(path, what):
    """Run ``what`` with the agent's side and a rank."""
    pid = os.getpid()

    async def run():
        changes = []
        parking = Standby(path, lambda: changes.append(dict(parking.processes)))
        parking.open()
        rank = Rank(path)
        try:
            await until(lambda: pid in parking.processes and parking.processes[pid].attempt == 1)
            assert parking.reason(pid) is None
            await what(parking, pid, rank)
            assert changes
        finally:
            parking.close()
        await until(lambda: not rank.is_alive())
        assert not path.exists()
        return rank

    return asyncio.run(run())


def test_a_rank_leaves_waits_on_standby_and_continues(lot):
    async def what(parking, pid, rank):
        parking.leave(pid)
        await until(lambda: parking.reason(pid))
        assert parking.reason(pid) == "a peer was lost"
        parking.leave(pid)  # nothing happens twice
        parking.assign(pid, Assignment({"RANK": "3"}, ["--config-file", "x"]))
        assert parking.reason(pid) is None
        await until(lambda: not rank.is_alive())

    assert hosted(lot, what).heard == Assignment({"RANK": "3"}, ["--config-file", "x"])


def test_a_rank_on_standby_ends_with_its_agent(lot):
    async def what(parking, pid, rank):
        parking.leave(pid)
        await until(lambda: parking.reason(pid))

    assert hosted(lot, what).heard is None


def test_a_rank_that_is_gone_is_forgotten(lot):
    async def shut(parking, pid, rank):
        parking.leave(pid)
        await until(lambda: parking.reason(pid))
        parking._drop(pid)
        assert parking.reason(pid) is None
        parking.leave(pid)

    assert hosted(lot, shut).heard is None


def test_without_an_agent_there_is_no_link():
    assert AgentLink.from_environment({}) is None
    with pytest.raises(OSError):
        AgentLink.from_environment({"WEFT_AGENT": "/nowhere/agent"})
