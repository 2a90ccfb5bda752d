"""The processes of a host's ranks: forked, examined, put on standby, and ended.

A rank that survives a fault keeps its process on standby, and waits for its assignment in the next attempt. One Unix
socket per rank carries one JSON message per packet. The agent requests that a rank leave its attempt. The rank reports
that it has left, on request or by itself. Then the agent sends the rank's next environment and arguments, or closes the
socket, which ends the rank.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weft.comm.authenticated_socket import Address
from weft.conf.host.diagnosis import DOCTOR, doctor_arguments, failures, read_results
from weft.conf.host.processes import STOPPED, peer_process, process_state
from weft.engine.supervision.agent.forkserver import ForkServer
from weft.engine.supervision.agent.output import Answer, Output
from weft.engine.supervision.messages import (
    MOST_BYTES,
    Assignment,
    Fork,
    Imported,
    Leave,
    Membership,
    Signal,
    decode,
    encode,
)

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
        asyncio.get_running_loop().add_reader(server.socket, self._read_server)

    def _read_server(self) -> None:
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


DOCTOR_S = 60.0
"""Timeout of an examination in seconds. A host that exceeds it has failed."""


async def examine(ranks: Ranks, run_folder: Path, slots: int, driver: Address) -> list[str]:
    """Run `weft doctor node` on this host, and return its failed checks, one line each.

    Args:
        ranks: the host's ranks. Their forkserver has already imported the modules that a doctor needs.
    """
    where = "" if isinstance(driver, str) else "{}:{}".format(*driver)  # a driver on this machine uses the same clock
    arguments = doctor_arguments(run_folder, ranks=slots, driver=where)
    printed, code = await ranks.ask("doctor", DOCTOR, arguments, DOCTOR_S)
    return [f"{result.check}: {result.text}" for result in failures(read_results(printed, code))]


@dataclass
class StandbyState:
    """An agent's state of a rank's process.

    Attributes:
        attempt: the rank's latest attempt, or None before its first.
        reason: why it has left that attempt, or None while it takes part.
        leaving: whether it is releasing the attempt's resources.
    """

    link: socket.socket
    attempt: int | None = None
    reason: str | None = None
    leaving: bool = False


@dataclass
class Standby:
    """The agent's side of standby, in its event loop.

    Attributes:
        path: path of the socket, in a folder that is private to this user.
        on_change: called when a rank has joined an attempt, left it or ended.
        processes: states of ranks by pid, which the kernel reports for the socket.
    """

    path: Path
    on_change: Callable[[], None]
    processes: dict[int, StandbyState] = field(default_factory=dict)

    def open(self) -> None:
        """Listen on the socket. Raise OSError if the socket cannot be created."""
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def leave(self, pid: int) -> None:
        """Request that a rank leave its attempt. This has no effect if the rank has left or is not connected."""
        known = self.processes.get(pid)
        if known is not None and known.reason is None:
            self._send(pid, Leave())

    def assign(self, pid: int, assignment: Assignment) -> None:
        """Assign a rank on standby to the next attempt."""
        self.processes[pid].reason = None
        self._send(pid, assignment)

    def reason(self, pid: int) -> str | None:
        """Return why a rank has left its attempt, or None if it has not."""
        known = self.processes.get(pid)
        return None if known is None else known.reason

    def is_leaving(self, pid: int) -> bool:
        """True if a rank has reported that it is leaving its attempt."""
        known = self.processes.get(pid)
        return known is not None and known.leaving

    def close(self) -> None:
        """End every rank on standby, and stop listening."""
        self.close_listener()
        for pid in list(self.processes):
            self._drop(pid)
        self.path.unlink(missing_ok=True)

    def close_listener(self) -> None:
        """Stop listening. Connections stay open."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            link, _ = self._listener.accept()
            pid, user = peer_process(link)
            if user != os.getuid():
                link.close()
                return
            link.setblocking(False)
            self.processes[pid] = StandbyState(link)
            asyncio.get_running_loop().add_reader(link, self._read_rank, pid)

    def _read_rank(self, pid: int) -> None:
        known = self.processes[pid]
        try:
            data = known.link.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(pid)
        else:
            state = decode(data, Membership)
            known.attempt = known.attempt if state.joined is None else state.joined
            known.reason, known.leaving = state.left, state.leaving
        self.on_change()

    def _send(self, pid: int, message: Leave | Assignment) -> None:
        try:
            self.processes[pid].link.send(encode(message))
        except OSError:
            self._drop(pid)

    def _drop(self, pid: int) -> None:
        known = self.processes.pop(pid, None)
        if known is not None:
            asyncio.get_running_loop().remove_reader(known.link)
            known.link.close()
