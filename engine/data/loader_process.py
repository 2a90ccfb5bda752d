"""The loader process of a host: ``python -m weft.engine.data.loader_process DESCRIPTOR``, that of a listening socket.

It serves the ranks of one user, in one thread: all ranks request the same blocks.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from weft.comm.values import decode
from weft.conf.host.processes import peer_process
from weft.conf.host.threads import Thread
from weft.engine.data.host_loader import ANSWER, BLOCK, END, FAILED, INVALID, Stream
from weft.engine.data.loader import open_order
from weft.engine.data.order import Cursor, Order, Placed
from weft.engine.data.shared_block import write_block
from weft.engine.data.tokenizer import load_tokenizer

RECENT = 4
"""Blocks that stay in memory for ranks that have not requested them yet. Ranks that step together are closer."""
_MOST_BYTES = 1 << 16


class Blocks:
    """The blocks of one order, each of which is made once for all ranks.

    Attributes:
        made: number of blocks that were read, tokenised and packed.
    """

    def __init__(self, order: Order) -> None:
        self.made = 0
        self._order = order
        self._upcoming: Iterator[Placed] = iter(())
        self._recent: OrderedDict[tuple[int, int], int | None] = OrderedDict()  # None is the end of the pass

    def find(self, cursor: Cursor, *, after: bool) -> int | None:
        """Return the descriptor of the block of ``cursor``, or of the block after it. None is the end of the pass."""
        key = (cursor.epoch, cursor.block)
        keys = list(self._recent)
        if key not in keys:
            self._restart(cursor)
            return self._next() if after else self._recent[key]
        if not after:
            return self._recent[key]
        following = keys[keys.index(key) + 1 :]
        return self._recent[following[0]] if following else self._next()

    def _restart(self, cursor: Cursor) -> None:
        self.forget()
        self._upcoming = self._order.blocks(cursor)
        self._next()

    def _next(self) -> int | None:
        placed = next(self._upcoming, None)
        if placed is None:
            last = next(reversed(self._recent), (0, -1))
            self._recent[last[0], last[1] + 1] = None
            return None
        self.made += 1
        file = self._recent[placed.cursor.epoch, placed.cursor.block] = write_block(placed)
        while len(self._recent) > RECENT:
            _close(self._recent.popitem(last=False)[1])
        return file

    def forget(self) -> None:
        """Forget the position and release all blocks."""
        while self._recent:
            _close(self._recent.popitem()[1])
        self._upcoming = iter(())


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


class Server:
    """Answers the requests of ranks, one after the other."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._blocks: dict[bool, Blocks] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, listener: socket.socket) -> None:
        """Serve until the process ends."""
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        while True:
            for event, _ in self._selector.select():
                event.data()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if peer_process(connection)[1] != os.getuid():
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, connection, bytearray()))

    def _read(self, connection: socket.socket, request: bytearray) -> None:
        try:
            data = connection.recv(_MOST_BYTES)
            request += data
            if request.endswith(b"\n"):
                self._answer(connection, json.loads(request))
                request.clear()
        except ConnectionError:
            data = b""
        if not data:  # the rank has ended
            self._selector.unregister(connection)
            connection.close()

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        evaluation = request["evaluation"]
        try:
            if evaluation not in self._blocks:
                self._blocks[evaluation] = Blocks(self._open(evaluation))
            file = self._blocks[evaluation].find(Cursor(**request["cursor"]), after=request["after"])
        except Exception as error:  # raised by each rank
            if evaluation in self._blocks:
                self._blocks[evaluation].forget()
            is_invalid = isinstance(error, ValueError)
            text = (str(error) if is_invalid else f"{type(error).__name__}: {error}").encode()
            connection.sendall(ANSWER.pack(INVALID if is_invalid else FAILED, len(text)) + text)
            return
        if file is None:
            connection.sendall(ANSWER.pack(END, 0))
        else:
            socket.send_fds(connection, [ANSWER.pack(BLOCK, 0)], [file])

    def _open(self, evaluation: bool) -> Order:
        stream = self._stream
        tokenizer = load_tokenizer(stream.model, stream.data)
        now = datetime.fromisoformat(stream.now) if stream.now else None
        return open_order(stream.data, tokenizer, seed=stream.seed, evaluation=evaluation, now=now)


def _end_with_rank(rank: socket.socket) -> None:
    """Wait until the rank that started this process has ended, and end this process, even within a library's call."""
    rank.recv(1)
    os._exit(0)


def main(argv: Sequence[str]) -> None:
    """Receive the settings from the rank at standard input, and serve the ranks that connect."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides
    rank = socket.socket(fileno=0)
    _, files, _, _ = socket.recv_fds(rank, 1, 1)
    if not files:  # the rank has ended
        return
    Thread(_end_with_rank, rank, name="weft-rank").start()
    with open(files[0], "rb") as file:
        stream = decode(file.read(), (Stream,))
    Server(stream).serve(socket.socket(fileno=int(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
