"""The agent of a host: starts its ranks, reads and reports their progress, and carries out the driver's commands.

The driver sends the desired state (which attempt, with which ranks, running or not), never a next action. So a repeated
message has no effect, and an agent that reconnects after a network cut needs only the latest one. An agent continues
for a while without a driver, and the first host's agent restarts it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from weft.engine.observability.watcher import ERROR_FILE, PROGRESS_PAGE
from weft.engine.stop_signals import STOP
from weft.engine.supervision.agent.forkserver import ForkServer, read_command
from weft.engine.supervision.agent.guard import DriverGuard
from weft.engine.supervision.agent.output import Output, Repeats, Writer, stderr_on_thread
from weft.engine.supervision.agent.processes import Rank, Ranks, Standby, examine
from weft.engine.supervision.agent.reports import RankReports, ReportTimes, Vitals
from weft.engine.supervision.control import ControlClient
from weft.engine.supervision.messages import (
    AGENT,
    ATTEMPT,
    MEMORY,
    AgentCommand,
    AgentMessage,
    Assignment,
    DesiredState,
    HostReport,
    from_fields,
    to_fields,
)
from weft.engine.supervision.progress_page import (
    Ownership,
    ProgressReader,
    is_owned,
    page_path,
    remove_stale,
    take_page,
)

LEAVE_STARTS_S, LEAVE_S = 3.0, 10.0
"""Seconds in which a rank must begin to leave an attempt, and must have left it. After that it is killed."""
RUN_ENDS_S = 2.0
"""Seconds that a terminating agent waits for the driver's message that the run has ended."""
LOOK_S = 0.1
"""Seconds between polls of the ranks' progress. A change of phase is reported at once."""


def main() -> int:
    """Run the agent that standard input describes, until the driver ends it. Arguments are modules to import."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # training continues when the terminal closes
    command, server = read_command(sys.argv[1:])
    if command is None:
        return 1
    os.environ.update(command.environment)
    with stderr_on_thread():
        return asyncio.run(Agent(command, server).run())


class Agent:
    """The ranks of a host, and the connection to the driver."""

    def __init__(self, command: AgentCommand, server: ForkServer | None = None) -> None:
        """Store the settings. Nothing starts before `run`.

        Args:
            server: a forkserver that was started before the command arrived.
        """
        self._command, self._server = command, server
        self._wanted = DesiredState()
        self._attempt = 0
        self._mine: list[Rank] = []
        self._examined, self._failed = 0, list[str]()
        self._met, self._answered, self._changed, self._leaving, self._ended = (asyncio.Event() for _ in range(5))
        self._signalled = set[str]()
        self._has_host = self._replaced = False
        self._writer, self._repeats = Writer(), Repeats()
        self._vitals = Vitals(Path(command.run_folder))
        self._reports = RankReports()
        self._guard = DriverGuard(command)
        self._page = page_path(Path(command.run_folder), command.host)
        self._memory = self._page.with_name(f"{self._page.name}.memory{command.launch}")
        self._standby = Standby(self._page.with_name(f"{self._page.name}.agent{command.generation}"), self._changed.set)

    async def run(self) -> int:
        """Serve the driver until it ends this agent, or has been away for too long."""
        self._client = ControlClient(
            self._command.address,
            name=self._command.peer,
            on_message=self._on_message,
            on_connected=self._on_connected,
            on_lost=self._guard.lost,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._follow_parent()
        self._client.start()
        try:
            await _first_of(self._serve(), self._guard.watch(), self._leave_when_asked(), self._ended.wait())
        finally:
            failed = await self._leave_host() if self._has_host else False
            await self._client.close()
            self._writer.close()
        return 1 if failed else 0

    def _follow_parent(self) -> None:
        """Exit with the driver's process if no other driver can replace it."""
        if not self._command.parent:
            return
        try:
            parent = os.pidfd_open(self._command.parent)
        except ProcessLookupError:
            self._ended.set()
        else:
            asyncio.get_running_loop().add_reader(parent, self._ended.set)

    def _on_signal(self) -> None:
        """Let ranks save a checkpoint on the first signal. Exit on the second."""
        if self._leaving.is_set():
            self._ended.set()
        self._leaving.set()
        self._changed.set()

    async def _leave_when_asked(self) -> None:
        """After a signal, return once the ranks have ended or ``stop_s`` has passed. Serve the driver until then."""
        await self._leaving.wait()
        asked = monotonic()
        while self._has_host and self._busy() and monotonic() - asked < self._command.stop_s:
            await asyncio.sleep(LOOK_S)
        if self._has_host and self._mine:
            self._send_report()
            await asyncio.sleep(RUN_ENDS_S)

    def _ask_to_stop(self) -> None:
        """Send SIGTERM once to each rank. A rank then ends after its step.

        Without memory checkpoints, all ranks are signalled at once. With them, a rank that still imports is
        signalled after its imports, because it may have steps to save.
        """
        for local, rank in enumerate(self._mine):
            begun = self._reports.reading(local) is not None or not self._memory.exists()
            if rank in self._busy() and rank.name not in self._signalled and begun:
                self._signalled.add(rank.name)
                self._ranks.send_signal(rank, signal.SIGTERM)

    async def _serve(self) -> None:
        """Act as the host's agent once the driver has accepted this one. Return when imports have failed."""
        if self._command.yields_s:
            await self._let_other_come()
            self._send_report()
        await self._answered.wait()
        self._take_host()
        await _first_of(self._reconcile(), self._report(), self._ranks.failed.wait())

    async def _let_other_come(self) -> None:
        """Wait up to ``yields_s`` seconds while another live agent of the host may reconnect to the driver."""
        await self._met.wait()
        met = monotonic()
        while monotonic() - met < self._command.yields_s and is_owned(self._page):
            await asyncio.sleep(LOOK_S)

    def _take_host(self) -> None:
        """Create this agent's resources on the host, and remove those of earlier agents."""
        self._make_page()
        remove_stale(self._memory.parent, self._page.name)
        for left in set(self._memory.parent.glob(f"{self._page.name}.memory*")) - {self._memory}:
            shutil.rmtree(left, ignore_errors=True)
        self._ranks = Ranks(self._command.preload, self._changed.set, self._server)
        self._has_host = True

    def _make_page(self) -> None:
        self._page = take_page(self._page, self._command.slots)
        self._owned = Ownership(self._page)
        self._standby.path = self._page.with_name(f"{self._page.name}.agent{self._command.generation}")
        self._standby.open()

    def _remake_page(self) -> None:
        """Create page and socket again if they were removed. Running ranks have them open, but new ranks need them."""
        if self._page.exists() and self._standby.path.exists():
            return
        print(f"weft: {self._page.parent}: what agent and ranks share was removed; made again", file=sys.stderr)
        self._owned.release()
        self._standby.close_listener()
        self._make_page()

    async def _leave_host(self) -> bool:
        """End the ranks and remove all resources. Return whether the imports have failed."""
        await self._ranks.stop([rank for rank in self._mine if rank.code is None])
        self._send_report()
        self._ranks.close()
        self._standby.close()
        if not self._replaced:  # otherwise its successor uses them
            shutil.rmtree(self._memory, ignore_errors=True)
            for file in (self._page, *self._errors()):
                file.unlink(missing_ok=True)
        self._owned.release()
        return self._ranks.failed.is_set()

    def _on_connected(self) -> None:
        self._guard.met()
        self._met.set()
        if self._has_host:
            self._send_report()

    def _on_message(self, message: dict[str, Any]) -> None:
        state = from_fields(message, DesiredState)
        if state.end:
            self._replaced = state.replaced
            self._ended.set()
        elif state.attempt >= self._wanted.attempt:
            self._wanted = state
            self._answered.set()
            self._changed.set()

    async def _reconcile(self) -> None:
        """Bring the ranks to the desired state whenever either changes."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            if wanted.attempt > self._attempt or not wanted.run:
                await self._end_attempt(wanted.drop)
            if wanted.run and wanted.attempt > self._attempt:
                await self._start(wanted)
            if wanted.examine and wanted.attempt > self._examined:
                command = self._command
                self._failed = await examine(self._ranks, Path(command.run_folder), command.slots, command.address)
                self._examined = wanted.attempt
            self._send_report()

    async def _end_attempt(self, drop: Sequence[int] | None) -> None:
        """End the ranks that take part in an attempt, or put them on standby.

        Args:
            drop: ranks whose processes must end. None ends all processes.
        """
        if drop is None:
            await self._ranks.stop([rank for rank in self._mine if rank.code is None])
            return
        await self._ranks.stop([rank for rank in self._mine if rank.code is None and rank.rank in drop])
        await self._ranks.stop([rank for rank in self._busy() if rank.pid not in self._standby.processes])
        for rank in self._busy():
            self._standby.leave(rank.pid)
        asked = monotonic()
        while busy := self._busy():
            waited = monotonic() - asked
            await self._ranks.stop(
                [rank for rank in busy if waited > (LEAVE_S if self._standby.is_leaving(rank.pid) else LEAVE_STARTS_S)]
            )
            await asyncio.sleep(0.01)

    def _busy(self) -> list[Rank]:
        return [rank for rank in self._mine if rank.code is None and self._standby.reason(rank.pid) is None]

    async def _start(self, wanted: DesiredState) -> None:
        """Start an attempt. Reuse processes on standby and fork the others."""
        self._remake_page()
        self._attempt = wanted.attempt
        # By local rank, because a process stays with its GPU.
        standby = {local: rank for local, rank in enumerate(self._mine) if rank.code is None}
        self._mine = []
        self._reports = RankReports(self._mine, ProgressReader(self._page).read, self._errors())
        for local, number in enumerate(wanted.ranks):
            self._errors()[local].unlink(missing_ok=True)
            environment = self._environment(wanted, local)
            if wanted.stop:
                environment[STOP] = str(wanted.stop)
            log = Path(self._command.run_folder, "supervisor", "logs", f"attempt{self._attempt}", f"rank{number}.log")
            kept = standby.pop(local, None)
            if kept is not None:
                if wanted.stop:
                    self._signalled.add(kept.name)
                kept.rank, kept.attempt = number, self._attempt
                kept.output.go_on_in(log)
                self._mine.append(kept)
                self._standby.assign(kept.pid, Assignment(environment, wanted.arguments))
                continue
            output = Output(log, self._writer, partial(self._vitals.matches.take, number), self._repeats)
            rank = Rank(f"{self._attempt}/{number}", output=output, rank=number, attempt=self._attempt)
            self._mine.append(rank)
            if wanted.stop:
                self._signalled.add(rank.name)
            await self._ranks.start(rank, wanted.target, wanted.arguments, environment)
        await self._ranks.stop(list(standby.values()))

    def _environment(self, wanted: DesiredState, local: int) -> dict[str, str]:
        ranks = wanted.ranks
        lasting = {} if self._command.parent else {MEMORY: str(self._memory)}
        in_process = {AGENT: str(self._standby.path)} if wanted.in_process else {}
        return {
            **self._command.environment,
            **wanted.environment,
            **lasting,
            **in_process,
            "RANK": str(ranks[local]),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            ATTEMPT: str(self._attempt),
            PROGRESS_PAGE: str(self._page),
            ERROR_FILE: str(self._errors()[local]),
        }

    async def _report(self) -> None:
        times = ReportTimes(self._command.heartbeat_s)
        while True:
            now = monotonic()
            if times.beats(now):
                self._owned.renew()
                self._ranks.resume_stopped()
                self._vitals.refresh()
            if self._leaving.is_set() or self._wanted.stop:
                self._ask_to_stop()
            if times.tells(now, self._reports.phases(), self._reports.is_one_stopped):
                self._send_report()
            await asyncio.sleep(LOOK_S)

    def _errors(self) -> list[Path]:
        """Return the error files of the local ranks. They are in shared memory, because the disk may be full."""
        return [self._page.with_name(f"{self._page.name}.error{local}") for local in range(self._command.slots)]

    def _send_report(self) -> None:
        reports = self._reports
        standby = {rank.rank: self._standby.reason(rank.pid) for rank in self._mine if rank.code is None}
        message = AgentMessage(
            attempt=self._attempt,
            ready=self._has_host and self._ranks.ready,
            report=HostReport(self._command.host, reports.ranks(), self._vitals.take()),
            ends=reports.ends(),
            standby={rank: reason for rank, reason in standby.items() if reason is not None},
            lines=reports.last_lines(),
            examined=self._examined,
            failed=self._failed,
            leaving=self._leaving.is_set(),
        )
        self._client.send(to_fields(message), latest_of="report")


async def _first_of(*work: Coroutine[Any, Any, Any]) -> None:
    """Run all coroutines until one ends, cancel the others, and raise the error of the one that ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
