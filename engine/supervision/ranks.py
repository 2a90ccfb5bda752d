"""The processes of one host as its agent holds them: forked by a forkserver, their output read, their ends noticed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from weft.conf.processes import STOPPED, process_state
from weft.engine.supervision.forkserver import ForkServer
from weft.engine.supervision.output import Answer, Output

TERM_S = 0.2
"""Seconds between asking a rank to end and killing it."""
_POLL_S = 0.01


class _Streams(Protocol):
    """Where what a process prints goes; as `Output`."""

    def open(self) -> tuple[int, int]: ...

    def drain(self) -> None: ...


@dataclass
class Process:
    """A process that the forkserver has forked, or will.

    Attributes:
        name: what agent and forkserver call it, as long as it lives.
        output: what it prints.
        pid: its number; 0 until it runs.
        code: its exit code, negative for a signal; None while it runs.
    """

    name: str
    output: _Streams
    pid: int = 0
    code: int | None = None


@dataclass(kw_only=True)
class Rank(Process):
    """A process of a rank.

    Attributes:
        rank: its global number in the attempt that it takes part in.
    """

    output: Output
    rank: int
    attempt: int


@dataclass
class Ranks:
    """The forkserver of a host, and what it has forked: ranks, and a doctor at times.

    Attributes:
        preload: modules that the forkserver imports.
        on_change: called when a process has ended.
        server: the forkserver, if it was started before.
        failed: set when the imports have failed; the forkserver has printed why.
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
        """Start a process as soon as the forkserver is ready; `Process.pid` says when it runs."""
        await self._ready.wait()
        order = {
            "name": process.name,
            "target": target,
            "arguments": list(arguments),
            "environment": dict(environment),
        }
        self.running[process.name] = process
        ends = process.output.open()
        socket.send_fds(self._server.socket, [json.dumps(order).encode()], ends)
        for end in ends:
            os.close(end)

    async def ask(self, name: str, target: str, arguments: Sequence[str], limit_s: float) -> tuple[str, int | None]:
        """Return the output of a process that runs ``target``, and its exit code; None if it has not ended in time.

        Args:
            limit_s: seconds after which it is killed, with all that it has started.
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
        """End ranks: SIGTERM, `TERM_S` later SIGKILL; stopped ranks get SIGKILL at once, as they ignore SIGTERM."""
        for rank in ranks:
            if rank.name not in self.running:  # it was still to be started
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
        """Send a signal to a process that has not ended; the forkserver knows, so no other can get it."""
        if process.code is None and process.name in self.running:
            with suppress(OSError):  # the forkserver has ended, and what it has forked with it
                self._server.socket.send(json.dumps({"name": process.name, "signal": int(number)}).encode())

    def resume_stopped(self) -> None:
        """Let a forkserver that a signal has stopped go on, because nothing starts or ends without it."""
        pid = self._server.process.pid
        state = process_state(pid)
        if state is not None and state.state in STOPPED:
            print(
                f"weft: the forkserver (process {pid}) was stopped by a signal; it goes on", file=sys.stderr, flush=True
            )
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End the forkserver, and with it every rank."""
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
        elif "ready" in message:
            self._ready.set()
        else:
            process = self.running[message["name"]]
            process.pid = message["pid"]
            if "code" in message:
                self._end(process, message["code"])

    def _restart_server(self) -> None:
        """The forkserver has ended, and the kernel has killed what it had forked."""
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
