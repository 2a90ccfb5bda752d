"""The load of a run's driver, with as many simulated agents as asked for, in a process of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from time import monotonic, process_time
from typing import Any

from weft.comm.control import ControlClient, ControlServer
from weft.conf.schema import SuperviseConfig
from weft.engine.supervision.driver import TICK_S
from weft.engine.supervision.job import Job, Stage
from weft.engine.supervision.layout import Layout
from weft.engine.supervision.message import AgentMessage
from weft.engine.supervision.places import Phase
from weft.engine.supervision.report import HostReport, RankReport
from weft.pipeline.culprit import JobRows, Place

LIMIT_S = 300.0
"""Seconds that the agents have to come."""
PERIODS = 3
"""Heartbeats of every agent in a repetition."""


class _World:
    """What a job does, less processes and disk."""

    def __init__(self, agents: int) -> None:
        self.server = ControlServer(on_message=self._hear, on_connected=self._meet)
        self.heard = 0
        slots = {f"host{number}": 1 for number in range(agents)}

        def layout(attempt: int, away: Collection[str], before: Mapping[str, int] | None) -> Layout:
            return Layout(slots, ("127.0.0.1", 1), ())

        # Agents that share a processor with the driver, and whatever else runs, may be late: this is not about that.
        settings = SuperviseConfig(silence_s=LIMIT_S, setup_deadline_s=LIMIT_S, least_deadline_s=LIMIT_S)
        self.job = Job(settings=settings, layouts=layout, effects=self, target="a:b")

    def _meet(self, peer: str) -> None:
        self.job.on_connected(*self._parts(peer), monotonic())

    def _hear(self, peer: str, message: dict[str, Any]) -> None:
        self.heard += 1
        self.job.on_report(*self._parts(peer), message, monotonic())

    @staticmethod
    def _parts(peer: str) -> tuple[str, int]:
        host, _, generation = peer.partition("#")
        return host, int(generation)

    def start_agent(self, host: str, generation: int) -> None:
        """All of them are one process."""

    def tell(self, host: str, generation: int, message: Mapping[str, Any]) -> None:
        """As a driver does."""
        self.server.send(f"{host}#{generation}", dict(message), latest_of="wanted")

    def record(self, event: str, **fields: Any) -> None:
        """Lines of the journal are rare."""

    def say(self, text: str) -> None:
        """To nobody."""

    def rows(self) -> JobRows | None:
        """Not known."""
        return None

    def denied(self) -> Mapping[str, str]:
        """Nobody."""
        return {}

    def deny(self, host: str, reason: str) -> None:
        """Nobody."""

    def newest_checkpoint(self) -> str:
        """None."""
        return ""


def driver_load(agents: int, repeat: int) -> list[float]:
    """Processor seconds of a driver for a heartbeat of every agent, which comes once a second; by repetitions.

    Raises:
        RuntimeError: the agents have not come, or the driver took them for faulty.
    """
    return asyncio.run(_drive(agents, repeat))


async def _drive(agents: int, repeat: int) -> list[float]:
    world = _World(agents)
    address = f"weft-bench-{os.getpid()}"
    await world.server.listen(address)
    world.job.launch(monotonic())
    players = subprocess.Popen([sys.executable, "-m", __name__, address, str(agents)])
    try:
        limit = monotonic() + LIMIT_S
        while world.job.stage is not Stage.running:
            if monotonic() > limit or players.poll() is not None:
                raise RuntimeError(f"{len(world.server.connected)} of {agents} agents have come")
            await asyncio.sleep(TICK_S)
        found = [await _second(world, agents) for _ in range(repeat + 1)][1:]  # in the first, agents still come
        if world.job.stage is not Stage.running:
            raise RuntimeError("the driver has found a fault where there is none")
        return found
    finally:
        players.send_signal(signal.SIGKILL)
        players.wait()
        await world.server.close()


async def _second(world: _World, agents: int) -> float:
    """Processor seconds of as many heartbeats as come in a second, and of a second's ticks."""
    heard, ticks, spent = world.heard, 0, process_time()
    ticking = 0.0
    while world.heard - heard < PERIODS * agents:
        await asyncio.sleep(TICK_S)
        before = process_time()
        world.job.tick(monotonic())
        ticking += process_time() - before
        ticks += 1
    handling = process_time() - spent - ticking
    return handling / (world.heard - heard) * agents + ticking / ticks / TICK_S


def main_agents(argv: Sequence[str]) -> int:
    """Be the agents: ``ADDRESS NUMBER``."""

    async def play() -> None:
        clients = [
            ControlClient(argv[0], name=f"host{number}#1", on_message=lambda message: None)
            for number in range(int(argv[1]))
        ]
        for client in clients:
            client.start()
            await asyncio.sleep(0)
        step = 1
        while True:
            began = monotonic()
            for number, client in enumerate(clients):
                rank = RankReport(number, 1, Phase.steady, Place(step, 3, True), 8, 0.01, step, state="R", cpu_s=step)
                report = HostReport(f"host{number}", (rank,), {"load": 1.0})
                client.send(AgentMessage(1, True, report, {}, {}, {}, 0, []).to_wire(), latest_of="report")
                if number % 64 == 0:
                    await asyncio.sleep(0)
            step += 1
            await asyncio.sleep(max(0.0, began + 1.0 - monotonic()))

    asyncio.run(play())
    return 0


if __name__ == "__main__":
    sys.exit(main_agents(sys.argv[1:]))
