"""The agent of a host: starts its ranks, reads where they are, tells the driver, and does what the driver wants.

The driver says what is wanted (which attempt, with which ranks, running or not), never what to do next. So an agent
that hears the same twice does nothing twice, and one that comes back after a cut needs to hear only the last.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from weft.comm.control import ControlClient
from weft.engine.supervision.faults import ERROR_FILE, OomKills, classify, read_report
from weft.engine.supervision.output import Output, Writer
from weft.engine.supervision.places import PlaceReader, make_page
from weft.engine.supervision.processes import process_state
from weft.engine.supervision.ranks import Rank, Ranks
from weft.engine.supervision.report import HostReport, RankReport, rank_report

LOOK_S = 0.1
"""Seconds between looks at the ranks' places; a change of phase is told at once."""
_GUARD_S = 1.0
"""Seconds without a driver after which the agent that guards it starts another."""


@dataclass(frozen=True)
class AgentOrder:
    """What an agent is told when it starts, as one line of JSON on its standard input.

    Attributes:
        host: name of its host.
        generation: number of this agent; the driver hears only the newest of a host.
        address: where the driver listens.
        run_folder: of the run.
        slots: most ranks of this host.
        preload: modules for the forkserver.
        environment: variables to set, some of them secret.
        heartbeat_s: seconds between reports.
        orphan_s: seconds without a driver after which it ends its ranks and itself.
        driver: command that starts the driver again; empty if another agent does.
    """

    host: str
    generation: int
    address: str | tuple[str, int]
    run_folder: str
    slots: int
    preload: list[str]
    environment: dict[str, str]
    heartbeat_s: float
    orphan_s: float
    driver: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, line: str) -> AgentOrder:
        """The order in a line of JSON."""
        fields = json.loads(line)
        if not isinstance(fields["address"], str):
            fields["address"] = tuple(fields["address"])
        return cls(**fields)

    @property
    def peer(self) -> str:
        """What the driver calls this agent."""
        return f"{self.host}#{self.generation}"


def main() -> int:
    """Be the agent that standard input describes, until the driver ends it."""
    order = AgentOrder.read(sys.stdin.readline())
    os.environ.update(order.environment)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may go, training goes on
    return asyncio.run(Agent(order).run())


class Agent:
    """The ranks of a host, and the connection to the driver."""

    def __init__(self, order: AgentOrder) -> None:
        """Nothing starts before `run`."""
        self._order = order
        self._wanted: dict[str, Any] = {"attempt": 0, "run": False}
        self._attempt = 0
        self._mine: list[Rank] = []
        self._said: dict[int, dict[str, Any]] = {}
        self._phases: list[Any] = []
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._writer = Writer()
        self._lost_since: float | None = monotonic()
        self._guarding: asyncio.subprocess.Process | None = None
        self._page = page_path(Path(order.run_folder), order.host)

    async def run(self) -> int:
        """Serve the driver until it ends this agent, or has been away for too long."""
        make_page(self._page, self._order.slots)
        self._places = PlaceReader(self._page)
        self._ranks = Ranks(self._order.preload, self._changed.set)
        self._client = ControlClient(
            self._order.address,
            name=self._order.peer,
            on_message=self._hear,
            on_connected=self._meet,
            on_lost=self._lose,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        self._client.start()
        work = [asyncio.create_task(each) for each in (self._reconcile(), self._report(), self._watch_driver())]
        work += [asyncio.create_task(_set(event)) for event in (self._ended, self._ranks.failed)]
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            task.cancel()
        await self._ranks.stop([rank for rank in self._mine if rank.code is None])
        self._send_report()
        await self._client.close()
        self._ranks.close()
        for file in (self._page, *self._errors()):
            file.unlink(missing_ok=True)
        self._writer.close()
        for task in done:
            task.result()
        return 1 if self._ranks.failed.is_set() else 0

    def _meet(self) -> None:
        self._lost_since = None
        self._send_report()

    def _lose(self) -> None:
        self._lost_since = monotonic()

    def _hear(self, message: dict[str, Any]) -> None:
        if message.get("end"):
            self._ended.set()
        elif message["attempt"] >= self._wanted["attempt"]:
            self._wanted = message
            self._changed.set()

    async def _reconcile(self) -> None:
        """Make what is there what is wanted, whenever either changes."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            alive = [rank for rank in self._mine if rank.code is None]
            if alive and (wanted["attempt"] > self._attempt or not wanted["run"]):
                await self._ranks.stop(alive)
            if wanted["run"] and wanted["attempt"] > self._attempt:
                await self._start(wanted)
            self._send_report()

    async def _start(self, wanted: Mapping[str, Any]) -> None:
        self._attempt = wanted["attempt"]
        folder = Path(self._order.run_folder, "supervisor", "logs", f"attempt{self._attempt}")
        ranks = wanted["ranks"]
        common = {**wanted["environment"], "LOCAL_WORLD_SIZE": str(len(ranks)), "WEFT_PLACES": str(self._page)}
        self._mine = [Rank(rank, self._attempt, Output(folder / f"rank{rank}.log", self._writer)) for rank in ranks]
        self._oom_kills = OomKills(os.getpid())
        self._said.clear()
        for local, (rank, error) in enumerate(zip(self._mine, self._errors(), strict=False)):
            error.unlink(missing_ok=True)
            own = {
                "RANK": str(rank.rank),
                "LOCAL_RANK": str(local),
                "WEFT_ATTEMPT": str(self._attempt),
                ERROR_FILE: str(error),
            }
            await self._ranks.start(rank, wanted["target"], wanted["arguments"], {**common, **own})

    async def _report(self) -> None:
        """Tell the driver where the ranks are: regularly, and when a phase begins."""
        due = monotonic()
        while True:
            phases = [self._phase(local) for local in range(len(self._mine))]
            if monotonic() >= due or phases != self._phases:
                self._phases = phases
                self._send_report()
                due = monotonic() + self._order.heartbeat_s
            await asyncio.sleep(LOOK_S)

    def _phase(self, local: int) -> tuple[int, int] | None:
        reading = self._places.read(local)
        return reading and (reading.attempt, reading.phase)

    def _errors(self) -> list[Path]:
        """The error files of the local ranks: in memory, for the disk may be full."""
        return [self._page.with_name(f"{self._page.name}.error{local}") for local in range(self._order.slots)]

    def _send_report(self) -> None:
        report = HostReport(
            self._order.host, tuple(self._rank_report(local, rank) for local, rank in enumerate(self._mine))
        )
        ends = {str(rank.rank): self._end(local, rank) for local, rank in enumerate(self._mine) if rank.code}
        message = {"attempt": self._attempt, "ready": self._ranks.ready, "report": report.to_wire(), "ends": ends}
        self._client.send(message, latest_of="report")

    def _rank_report(self, local: int, rank: Rank) -> RankReport:
        return rank_report(
            rank.rank,
            rank.attempt,
            self._places.read(local),
            process_state(rank.pid) if rank.pid and rank.code is None else None,
            now_ns=monotonic_ns(),
            exit_code=rank.code,
        )

    def _end(self, local: int, rank: Rank) -> dict[str, Any]:
        """How a rank ended badly, as `RankEnd` has it, and what it printed last."""
        if rank.rank not in self._said:
            assert rank.code
            end = classify(rank.code, read_report(self._errors()[local]), oom_killed=self._oom_kills.seen())
            assert end is not None
            self._said[rank.rank] = {**vars(end), "kind": end.kind.value, "lines": rank.output.last_lines()}
        return self._said[rank.rank]

    async def _watch_driver(self) -> None:
        """Start the driver again where it is this agent's to do; end when there has been none for long."""
        while True:
            await asyncio.sleep(LOOK_S)
            away_s = 0.0 if self._lost_since is None else monotonic() - self._lost_since
            if away_s > self._order.orphan_s:
                print(f"weft: no driver for {away_s:.0f} s; ending the ranks of {self._order.host}", file=sys.stderr)
                return
            if self._guarding is not None and self._guarding.returncode is not None:
                self._guarding = None  # it could not have the run, because another driver has it
                await asyncio.sleep(_GUARD_S)
            elif away_s > _GUARD_S and self._order.driver and self._guarding is None:
                self._guarding = await asyncio.create_subprocess_exec(
                    *self._order.driver, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
                )


async def _set(event: asyncio.Event) -> None:
    await event.wait()


def page_path(run_folder: Path, host: str) -> Path:
    """Where the places of a host's ranks lie, in shared memory of this user alone."""
    name = hashlib.sha256(f"{run_folder.absolute()} {host}".encode()).hexdigest()[:16]
    return Path("/dev/shm", f"weft-{os.getuid()}", f"places-{name}")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
