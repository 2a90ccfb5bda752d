"""The processes of one host: the agent forks them by a forkserver, reads their output and detects their ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from weft.conf.host.processes import STOPPED, ProcessState, process_state
from weft.engine.supervision.forkserver import ForkServer
from weft.engine.supervision.messages import GONE, Fork, Imported, RankReport, Signal, encode
from weft.engine.supervision.output import Answer, Output
from weft.engine.supervision.progress_page import Reading

TERM_S = 0.2
"""Seconds between SIGTERM and SIGKILL to a rank."""
_POLL_S = 0.01


class _Streams(Protocol):
    """The sink of a process's output, such as `Output`."""

    def open(self) -> tuple[int, int]: ...

    def drain(self) -> None: ...


@dataclass
class Process:
    """A process that the forkserver has forked, or will fork.

    Attributes:
        name: identifies the process between agent and forkserver. It is unique while the process lives.
        output: sink of its output.
        pid: its pid, or 0 until it runs.
        code: its exit code, negative for a signal, or None while it runs.
    """

    name: str
    output: _Streams
    pid: int = 0
    code: int | None = None


@dataclass(kw_only=True)
class Rank(Process):
    """A process of a rank.

    Attributes:
        rank: its global rank in the current attempt.
    """

    output: Output
    rank: int
    attempt: int


@dataclass
class Ranks:
    """The forkserver of a host and its forked processes: ranks, and sometimes a doctor.

    Attributes:
        preload: modules that the forkserver imports.
        on_change: called when a process has ended.
        server: the forkserver, if it was started earlier.
        failed: set when the imports have failed, after the forkserver has printed why.
    """

    preload: Sequence[str]
    on_change: Callable[[], None]
    server: ForkServer | None = None
    running: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.failed = asyncio.Event()
        self._ready = asyncio.Event()
        self._take_server(self.server or ForkServer(self.preload))

    @property
    def ready(self) -> bool:
        """True if the imports are done."""
        return self._ready.is_set()

    async def start(
        self,
        process: Process,
        target: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """Start a process as soon as the forkserver is ready. `Process.pid` is 0 until then."""
        await self._ready.wait()
        fork = Fork(name=process.name, target=target, arguments=list(arguments), environment=dict(environment))
        self.running[process.name] = process
        ends = process.output.open()
        socket.send_fds(self._server.socket, [encode(fork)], ends)
        for end in ends:
            os.close(end)

    async def ask(self, name: str, target: str, arguments: Sequence[str], limit_s: float) -> tuple[str, int | None]:
        """Run ``target`` in a process. Return its output and its exit code, which is None if it did not end in time.

        Args:
            limit_s: seconds after which the process is killed, with its subprocesses.
        """
        answer = Answer()
        process = Process(name, answer)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.start(process, target, arguments, {})
                await _ended(process)
                return answer.text, process.code
        self.send_signal(process, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(_ended(process), TERM_S)
        return answer.text, None

    async def stop(self, ranks: Sequence[Rank]) -> None:
        """End ranks by SIGTERM, and by SIGKILL after `TERM_S`. Stopped ranks get SIGKILL only, as they do not react."""
        for rank in ranks:
            if rank.name not in self.running:  # it was not started yet
                rank.code = -signal.SIGKILL
            state = process_state(rank.pid)
            stopped = state is not None and state.state in STOPPED
            self.send_signal(rank, signal.SIGKILL if stopped else signal.SIGTERM)
        waited = 0.0
        while any(rank.code is None for rank in ranks):
            await asyncio.sleep(_POLL_S)
            waited += _POLL_S
            if waited >= TERM_S:
                for rank in ranks:
                    self.send_signal(rank, signal.SIGKILL)

    def send_signal(self, process: Process, number: signal.Signals) -> None:
        """Send a signal to a live process, by the forkserver, so that no process with a reused pid can receive it."""
        if process.code is None and process.name in self.running:
            with suppress(OSError):  # the forkserver has ended with all of its forked processes
                self._server.socket.send(encode(Signal(name=process.name, number=number)))

    def resume_stopped(self) -> None:
        """Continue a forkserver that a signal has stopped, because no process starts or ends without it."""
        pid = self._server.process.pid
        state = process_state(pid)
        if state is not None and state.state in STOPPED:
            print(
                f"weft: the forkserver (process {pid}) was stopped by a signal; it goes on", file=sys.stderr, flush=True
            )
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End the forkserver and every rank."""
        asyncio.get_running_loop().remove_reader(self._server.socket)
        self._server.close()

    def _take_server(self, server: ForkServer) -> None:
        self._server = server
        server.socket.setblocking(False)
        if server.ready:
            self._ready.set()
        else:
            self._ready.clear()
        asyncio.get_running_loop().add_reader(server.socket, self._hear)

    def _hear(self) -> None:
        try:
            message = self._server.receive()
        except BlockingIOError:
            return
        if message is None:
            self._restart_server()
        elif isinstance(message, Imported):
            self._ready.set()
        else:
            process = self.running[message.name]
            process.pid = message.pid
            if message.code is not None:
                self._end(process, message.code)

    def _restart_server(self) -> None:
        """Handle the end of the forkserver, whose forked processes the kernel has killed."""
        if not self.ready:
            self.failed.set()
            return
        asyncio.get_running_loop().remove_reader(self._server.socket)
        self._server.close()
        for process in list(self.running.values()):
            self._end(process, -signal.SIGKILL)
        self._take_server(ForkServer(self.preload))

    def _end(self, process: Process, code: int) -> None:
        del self.running[process.name]
        process.code = code
        process.output.drain()
        self.on_change()


async def _ended(process: Process) -> None:
    while process.code is None:
        await asyncio.sleep(_POLL_S)


def rank_report(
    rank: int,
    attempt: int,
    reading: Reading | None,
    process: ProcessState | None,
    *,
    now_ns: int,
    exit_code: int | None = None,
) -> RankReport:
    """Return the report of a rank.

    Args:
        attempt: the attempt that the agent has assigned the rank to.
        reading: the rank's record on the page. A record of an earlier attempt is ignored.
        process: state of the rank's process, or None if it has ended.
        now_ns: `time.monotonic_ns` of this host.
        exit_code: exit code of the rank, or None while it lives.
    """
    report = RankReport(rank, attempt, state=GONE, exit_code=exit_code)
    if process is not None:
        report = report._replace(
            state=process.state, cpu_s=round(process.cpu_s, 2), resident_bytes=process.resident_bytes
        )
    if reading is None or reading.attempt != attempt or reading.rank != rank:
        return report
    return report._replace(
        phase=reading.phase,
        place=reading.place,
        num_microbatches=reading.num_microbatches,
        still_s=round(max(0, now_ns - reading.moved_ns) / 1e9, 3),
        tick=reading.tick,
        busy_s=round(reading.busy_ns / 1e9, 6),
        measured_steps=reading.measured_steps,
        device_bytes=reading.device_bytes,
        kept_step=reading.kept_step,
        links=reading.links,
    )
