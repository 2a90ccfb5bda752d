"""The host's loader: one process that reads, tokenises and packs streamed data for all ranks of a host.

See MegaScale, section 3.4. A rank's thread requests blocks ahead of the step, and maps them from shared memory.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import sleep

from weft.comm.values import encode
from weft.conf.host.processes import peer_process
from weft.conf.schema import DataConfig, ModelConfig
from weft.engine.data.order import Cursor, Placed
from weft.engine.data.shared_block import read_block

ANSWER = struct.Struct("=qq")
"""An answer of the process: its kind, and the length of the text that follows. A block comes as a descriptor."""
BLOCK, END, INVALID, FAILED = range(4)
"""Kinds of answers: a block, the end of a pass, an error in the data, and another error."""
_ATTEMPTS = 3
"""Starts of the process for one block, before its loss is an error."""
_RETRY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Everything from which the process opens the data, equal on all ranks.

    Attributes:
        model: names the tokenizer.
        now: the time that a chat template may show, in ISO format, or empty for the current time.
    """

    model: ModelConfig
    data: DataConfig
    seed: int
    now: str = ""


class HostLoader:
    """A rank's access to the loader process of its host.

    The first rank that needs the process starts it. If the process ends, another one is started, and continues with the
    block that was requested: a block depends only on its position. The process ends with the rank that started it.

    Attributes:
        stream: the data.
        process: the process, if this rank has started it.
        closed: whether `close` was called.
    """

    def __init__(self, name: str, stream: Stream | None = None) -> None:
        """Do not start yet.

        Args:
            stream: the data, or None if it is not known yet. See `configure`.
            name: name of an abstract socket, secret and the same on all ranks of the job. Such a socket leaves no file.
                Both ends check that the other one belongs to this user.
        """
        self.stream = stream
        self._control: socket.socket | None = None
        self._address = f"\0weft-data-{name}"
        self._lock = threading.Lock()
        self.closed = False
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless a rank of this host has done so. The call does not wait for its imports."""
        with self._lock, socket.socket(socket.AF_UNIX) as listener:
            if self.closed:
                return
            try:
                listener.bind(self._address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return
            listener.listen(socket.SOMAXCONN)
            self._end()
            self._control, theirs = socket.socketpair()
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "weft.engine.data.loader_process", str(listener.fileno())],
                    stdin=theirs.fileno(),  # its end is that of this rank, and ends the process
                    pass_fds=[listener.fileno()],
                )
            self._send()

    def configure(self, stream: Stream) -> None:
        """Set the data. A process that was started earlier has imported its modules in the meantime."""
        with self._lock:
            self.stream = stream
            self._send()

    def _send(self) -> None:
        """Send the settings to this rank's own child, in memory, because a pipe would block until it reads."""
        if self._control is None or self.stream is None:
            return
        with os.fdopen(os.memfd_create("weft-data-settings"), "w+b") as settings, suppress(BrokenPipeError):
            settings.write(encode(self.stream))
            settings.seek(0)
            socket.send_fds(self._control, [b"s"], [settings.fileno()])

    def close(self) -> None:
        """End the process, if this rank has started it."""
        self.closed = True
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self.process is not None:
            assert self._control is not None
            self.process.kill()
            self._control.close()
            self.process.wait()
            self._control = None

    def connect(self) -> socket.socket:
        """Connect to the process, which may have to be started.

        Raises:
            ConnectionError: this loader is closed, or the process has ended.
            PermissionError: the listener belongs to another user.
        """
        for _ in range(_ATTEMPTS if not self.closed else 0):
            connection = socket.socket(socket.AF_UNIX)
            with suppress(ConnectionRefusedError):
                connection.connect(self._address)
                if peer_process(connection)[1] == os.getuid():
                    return connection
                connection.close()
                raise PermissionError("the data loader's socket belongs to another user")
            connection.close()
            self.start()
            sleep(_RETRY_S)  # a rank that has bound the address does not listen yet
        raise ConnectionRefusedError

    def loss(self) -> str:
        """Return a description of the loss of the process."""
        code = None if self.process is None else self.process.poll()
        how = "" if code is None else f" (exit code {code})"
        return (
            f"the data loader of this host has ended{how} {_ATTEMPTS} times at one block; see its output and the "
            "kernel's log, and set data.shuffle_buffer lower if it lacks memory"
        )


class HostBlocks:
    """The blocks of one order, made by the host's loader. Only one iteration may run at a time."""

    def __init__(self, host: HostLoader, *, evaluation: bool) -> None:
        self._host = host
        self._evaluation = evaluation
        self._connection: socket.socket | None = None
        self._interrupts = 0

    def read(self, cursor: Cursor) -> Iterator[Placed]:
        """Yield the blocks from ``cursor`` on. See `weft.engine.data.order.Order.blocks`.

        Raises:
            ValueError: the data cannot be read or encoded.
            RuntimeError: the process has failed, or has ended several times at the same block.
        """
        interrupts, after = self._interrupts, False
        try:
            while (placed := self._find(cursor, after, interrupts)) is not None:
                yield placed
                cursor, after = placed.cursor, True
        finally:
            self._disconnect()

    def interrupt(self) -> None:
        """End the current iteration, which may be waiting in another thread."""
        self._interrupts += 1
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _find(self, cursor: Cursor, after: bool, interrupts: int) -> Placed | None:
        request = json.dumps({"evaluation": self._evaluation, "after": after, "cursor": asdict(cursor)})
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._connection = self._connection or self._host.connect()
                if self._interrupts != interrupts:  # since this iteration began, perhaps while it connected
                    return None
                return _request(self._connection, request.encode() + b"\n")
            except (EOFError, ConnectionError):
                self._disconnect()
                if self._interrupts != interrupts or self._host.closed:
                    return None
                if not left:
                    raise RuntimeError(self._host.loss()) from None
        return None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _request(connection: socket.socket, request: bytes) -> Placed | None:
    """Return the requested block, or None at the end of the pass."""
    connection.sendall(request)
    data, files, _, _ = socket.recv_fds(connection, ANSWER.size, 1)
    if len(data) < ANSWER.size:
        raise EOFError
    kind, length = ANSWER.unpack(data)
    if kind == BLOCK:
        try:
            return read_block(files[0])
        finally:
            os.close(files[0])
    if kind == END:
        return None
    with connection.makefile("rb") as text:
        message = text.read(length).decode()
    raise ValueError(message) if kind == INVALID else RuntimeError(f"the data loader of this host: {message}")
