"""Standby: a rank that survives a fault keeps its process, and waits for its assignment in the next attempt.

One Unix socket per rank carries one JSON message per packet. The agent requests that a rank leave its attempt. The
rank reports that it has left, on request or by itself. Then the agent sends the rank's next environment and arguments,
or closes the socket, which ends the rank. Both sides import this module, so it does not import torch.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weft.conf.host.threads import Thread
from weft.engine.supervision.messages import Assignment, Leave, Membership, decode, encode

AGENT = "WEFT_AGENT"
"""Environment variable of a rank: path of its agent's socket."""
MOST_BYTES = 1 << 17
"""Largest size of a message."""


class AgentLink:
    """A rank's connection to its agent."""

    def __init__(self, path: Path) -> None:
        """Connect to the agent's socket.

        Raises:
            OSError: no process listens there.
            ValueError: the listener belongs to another user.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(path))
        if _peer(self._socket)[1] != os.getuid():
            raise ValueError(f"{AGENT}={path}: another user listens there")
        self._assignments: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        self._on_leave: Callable[[], None] | None = None
        self._leaving = False
        self._changing = threading.Lock()
        Thread(self._hear, name="weft-agent").start()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AgentLink | None:
        """Connect to the agent that ``WEFT_AGENT`` names, or return None if restarts in this process are off."""
        path = environment.get(AGENT)
        return cls(Path(path)) if path else None

    @property
    def leaving(self) -> bool:
        """True if the agent has requested that this rank leave its attempt."""
        return self._leaving

    def begin(self, attempt: int, on_leave: Callable[[], None]) -> None:
        """Report that this rank takes part in an attempt.

        Args:
            on_leave: called on a thread, at most once, when the agent requests to leave it.
        """
        with self._changing:
            self._leaving, self._on_leave = False, on_leave
        self._send(Membership(joined=attempt))

    def tell_leaving(self) -> None:
        """Report that this rank is releasing its attempt's resources, which may take a while."""
        with suppress(OSError):  # `park` handles it
            self._send(Membership(leaving=True))

    def park(self, reason: str) -> Assignment | None:
        """Report that this rank has left its attempt. Wait for the next assignment, or None if the process must end."""
        with self._changing:
            self._on_leave = None
        try:
            self._send(Membership(left=reason[:4000]))
        except OSError:
            return None
        return self._assignments.get()

    def _send(self, state: Membership) -> None:
        self._socket.send(encode(state))

    def _hear(self) -> None:
        while True:
            try:
                data = self._socket.recv(MOST_BYTES)
            except OSError:
                data = b""
            if not data:
                return self._assignments.put(None)
            message: Leave | Assignment = decode(data, Leave | Assignment)  # type: ignore[arg-type]
            if isinstance(message, Leave):
                with self._changing:
                    act, self._on_leave = self._on_leave, None
                    self._leaving = True
                if act is not None:
                    act()
            else:
                self._assignments.put(message)


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
        """Listen on the socket.

        Raises:
            OSError: the socket cannot be created.
        """
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

    def parked(self, pid: int) -> str | None:
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
            pid, user = _peer(link)
            if user != os.getuid():
                link.close()
                return
            link.setblocking(False)
            self.processes[pid] = StandbyState(link)
            asyncio.get_running_loop().add_reader(link, self._hear, pid)

    def _hear(self, pid: int) -> None:
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


def _peer(end: socket.socket) -> tuple[int, int]:
    """Return pid and user of the process at the other end, as the kernel reports them."""
    pid, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, user
