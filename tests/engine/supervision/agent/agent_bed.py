"""An agent under test, with a driver that records its reports."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from time import monotonic

import psutil

from weft.engine.supervision.control import ControlServer
from weft.engine.supervision.messages import AgentCommand, AgentMessage, encode, from_fields
from weft.engine.supervision.progress_page import page_path

LIMIT_S = 60.0
TARGET = "tests.engine.supervision.agent.fake_ranks:run"
NOTHING_YET = {"attempt": 0, "run": False}


class Bed:
    """A driver's end of the wire, and an agent."""

    def __init__(self, folder, answer=NOTHING_YET, **order):
        self.folder, self.answer = folder, answer
        self.order = AgentCommand(
            **{
                "host": "here",
                "generation": 1,
                "address": f"weft-test-{os.getpid()}-{folder.name}",
                "run_folder": str(folder),
                "slots": 3,
                "preload": ["tests.engine.supervision.agent.fake_ranks"],
                "environment": {"SECRET": "s"},
                "heartbeat_s": 0.2,
                "orphan_s": 60.0,
            }
            | order
        )
        self.reports = []
        self.agent = None

    async def open(self):
        self.server = ControlServer(
            on_message=lambda peer, message: self.reports.append(message),
            on_connected=lambda peer: self.answer and self.server.send(peer, self.answer),
        )
        await self.server.listen(self.order.address)

    def start(self):
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "weft.engine.supervision.agent.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.agent.stdin.write(encode(self.order) + b"\n")
        self.agent.stdin.close()
        self.agent.stdin = None  # for communicate()

    def want(self, attempt, ranks, *arguments, run=True, drop=None, stop=0):
        message = {
            "attempt": attempt,
            "run": run,
            "ranks": ranks,
            "target": TARGET,
            "arguments": [str(self.folder), *arguments],
            "in_process": True,
            "drop": drop,
            "stop": stop,
            "environment": {"WORLD_SIZE": "9", "MASTER_ADDR": "m", "MASTER_PORT": "5"},
        }
        self.server.send(self.order.peer, message)

    async def run_waiting(self, attempt, ranks):
        """Let ranks run that wait to be ended."""
        self.want(attempt, ranks, "wait")
        await until(lambda: self.written(attempt, *ranks))

    def codes(self, attempt):
        """Exit codes by rank as last reported of an attempt; None if there is no report of it."""
        if not self.reports or self.reports[-1]["attempt"] != attempt:
            return None
        report = from_fields(self.reports[-1], AgentMessage).report
        return {rank.rank: rank.exit_code for rank in report.ranks}

    def facts(self, attempt, rank):
        return json.loads((self.folder / f"{attempt}.{rank}").read_text())

    def written(self, attempt, *ranks):
        return all((self.folder / f"{attempt}.{rank}").exists() for rank in ranks)


async def until(condition):
    limit = monotonic() + LIMIT_S
    while not condition():
        assert monotonic() < limit, "waited in vain"
        await asyncio.sleep(0.01)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@asynccontextmanager
async def started_agent(folder, **order):
    """A fresh agent and its driver."""
    bed = Bed(folder, **order)
    await bed.open()
    try:
        bed.start()
        yield bed
    finally:
        bed.agent.kill()
        bed.agent.wait()
        bed.agent.stdout.close()
        await bed.server.close()
        page = page_path(folder, bed.order.host)
        for left in page.parent.glob(f"{page.name}*"):  # of an agent that had no time to clear up
            shutil.rmtree(left) if left.is_dir() else left.unlink()


HOLD = "import sys, time, weft.conf.host.run_lock as r, pathlib as p; r.RunLock(p.Path(sys.argv[1])); time.sleep(99)"
