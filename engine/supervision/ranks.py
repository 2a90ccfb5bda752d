"""The ranks of one host as its agent holds them: started by a forkserver, their output read, their ends noticed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from weft.conf.processes import STOPPED, process_state
from weft.engine.supervision import forkserver
from weft.engine.supervision.output import Output

TERM_S = 1.0
"""Seconds between asking a rank to end and killing it."""


@dataclass
class Rank:
    """A process of a rank.

    Attributes:
        rank: its global number in the attempt that it takes part in.
        name: what agent and forkserver call it, as long as it lives.
        pid: its number; 0 until it runs.
        code: its exit code, negative for a signal; None while it runs.
    """

    rank: int
    attempt: int
    output: Output
    name: str
    pid: int = 0
    code: int | None = None


@dataclass
class Ranks:
    """The forkserver of a host, and the ranks that it has forked.

    Attributes:
        preload: modules that the forkserver imports.
        on_change: called when a rank has ended.
        failed: set when the imports have failed; the forkserver has printed why.
    """

    preload: Sequence[str]
    on_change: Callable[[], None]
    running: dict[str, Rank] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.failed = asyncio.Event()
        self._ready = asyncio.Event()
        self._start_server()

    @property
    def ready(self) -> bool:
        """Whether the imports are done."""
        return self._ready.is_set()

    async def start(self, rank: Rank, target: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a rank as soon as the forkserver is ready; `Rank.pid` says when it runs."""
        await self._ready.wait()
        order = {"name": rank.name, "target": target, "arguments": list(arguments), "environment": dict(environment)}
        self.running[rank.name] = rank
        ends = rank.output.open()
        socket.send_fds(self._socket, [json.dumps(order).encode()], ends)
        for end in ends:
            os.close(end)

    async def stop(self, ranks: Sequence[Rank]) -> None:
        """End ranks: SIGTERM, `TERM_S` later SIGKILL; at once those that are stopped, for they would not hear."""
        for rank in ranks:
            if rank.name not in self.running:  # it was still to be started
                rank.code = -signal.SIGKILL
            state = process_state(rank.pid)
            stopped = state is not None and state.state in STOPPED
            self.send_signal(rank, signal.SIGKILL if stopped else signal.SIGTERM)
        waited = 0.0
        while any(rank.code is None for rank in ranks):
            await asyncio.sleep(0.01)
            waited += 0.01
            if waited >= TERM_S:
                for rank in ranks:
                    self.send_signal(rank, signal.SIGKILL)

    def send_signal(self, rank: Rank, number: signal.Signals) -> None:
        """Send a signal to a rank that has not ended; the forkserver knows, so no other process can get it."""
        if rank.code is None and rank.name in self.running:
            with suppress(OSError):  # the forkserver has ended, and its ranks with it
                self._socket.send(json.dumps({"name": rank.name, "signal": int(number)}).encode())

    def close(self) -> None:
        """End the forkserver, and with it every rank."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._server.kill()
        self._server.wait()

    def _start_server(self) -> None:
        self._ready.clear()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        command = [sys.executable, "-m", forkserver.__name__, str(os.getpid()), str(theirs.fileno()), *self.preload]
        self._server = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**forkserver.ENVIRONMENT, **os.environ},
        )
        theirs.close()
        asyncio.get_running_loop().add_reader(self._socket, self._hear)

    def _hear(self) -> None:
        try:
            data = self._socket.recv(forkserver.MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._restart_server()
            return
        said = json.loads(data)
        if "ready" in said:
            if len(said["threads"]) > 1:
                print(f"weft agent: imports have started threads: {said['threads']}", file=sys.stderr, flush=True)
            self._ready.set()
            return
        rank = self.running[said["name"]]
        rank.pid = said["pid"]
        if "code" in said:
            self._end(rank, said["code"])

    def _restart_server(self) -> None:
        """The forkserver has ended, and the kernel has killed its ranks."""
        if not self.ready:
            self.failed.set()
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._server.wait()
        for rank in list(self.running.values()):
            self._end(rank, -signal.SIGKILL)
        self._start_server()

    def _end(self, rank: Rank, code: int) -> None:
        del self.running[rank.name]
        rank.code = code
        rank.output.drain()
        self.on_change()
