"""A copy of another host's bubble board, kept up to date over a connection, for readers on this host.

The host of the copy requests news all the time; the rank's host replies once the board has changed, or after `BEAT_S`.
A reply is a heartbeat of the copy, so without replies it looks dead after as long as a board whose rank is silent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, monotonic_ns, sleep

from weft.comm.message_stream import MessageStream
from weft.inference.board.clock_offset import ClockOffset
from weft.inference.board.reader import BoardReader
from weft.inference.board.view import BoardView
from weft.inference.board.writer import BoardWriter

BEAT_S = 0.1
"""Longest time that a request waits for a change."""
CHECK_S = 0.01
"""Seconds between checks for changes that ring no bell: a rank that begins to compute."""
LOST_S = 30.0
"""Seconds of silence after which the other host is lost. Loading weights may delay its replies."""
MOST_NEWS_BYTES = 2**26
"""Longest reply: all edges of a board as text."""
_REQUEST = b"board"


@dataclass(frozen=True, kw_only=True)
class News:
    """Changes of a board, in its host's nanoseconds.

    Attributes:
        is_alive: True if the rank is alive.
        ended: True if training has ended.
        board: rank, most edges of a step, and predicted edges of a new board that replaces the copy, or empty.
        rows: for each changed step its number, its kind, and its edges from the one with this index.
    """

    is_alive: bool
    ended: bool
    board: tuple[int, int, list[int]] | None = None
    rows: list[tuple[int, int, int, list[int]]] = field(default_factory=list)


class BoardSource:
    """A rank's board, on its host."""

    def __init__(self, path: str | Path) -> None:
        self._reader = BoardReader(path)
        self._view: BoardView | None = None
        self._plan: list[int] = []
        self._sent = 0, 0
        """The latest step that was sent, and how many of its edges."""

    def news(self, wait_s: float) -> News:
        """Return what has changed since the last call. Wait for a change for at most ``wait_s``."""
        deadline_ns = monotonic_ns() + round(wait_s * 1e9)
        while True:
            view, bell = self._reader.view, 0
            is_alive = view is not None and not view.why_dead(monotonic())
            if view is not None and is_alive:
                bell = view.bell.read()
                if (news := self._changes(view)) is not None:
                    return news
            if monotonic_ns() >= deadline_ns:
                return News(is_alive=is_alive, ended=self._reader.ended)
            if view is not None and is_alive:
                view.bell.wait(bell, CHECK_S)
            else:
                sleep(CHECK_S)

    def _changes(self, view: BoardView) -> News | None:
        plan, running, (step, count) = view.plan, view.running(), self._sent
        is_same = view is self._view and plan == self._plan
        if is_same and (running is None or (running.step, len(running.edges)) == self._sent):
            return None
        rows = view.rows()
        is_new = not is_same or (bool(rows) and rows[0].step > step + 1)
        if is_new:
            self._view, self._plan, step, count = view, plan, 0, 0
        changed = [
            (row.step, row.kind, skip, list(row.edges[skip:]))
            for row in rows
            if len(row.edges) > (skip := count if row.step == step else 0) and row.step >= step
        ]
        self._sent = (rows[-1].step, len(rows[-1].edges)) if rows else (0, 0)
        board = (view.rank, view.num_edges, plan) if is_new else None
        return News(is_alive=True, ended=False, board=board, rows=changed)


class BoardMirror:
    """The copy of a board, at the path of the rank's board on this host."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._writer: BoardWriter | None = None
        self._offset_ns = 0

    def apply(self, news: News, offset_ns: int) -> None:
        """Write ``news`` whose clock is ``offset_ns`` ahead of this host's."""
        if news.ended and self._writer is not None:
            self._writer.close()
            self._writer = None
        if news.board is not None:
            self.remove()
            rank, edges, plan = news.board
            times_s = [edge / 1e9 for edge in (*plan[1:], *plan[-1:])] if plan else []
            self._writer = BoardWriter(
                self._path,
                rank=rank,
                plan=list(zip(times_s[::2], times_s[1::2], strict=False)),
                max_edges=edges,
                steps_before=news.rows[0][0] - 1 if news.rows else 0,
                beats=False,
            )
        if self._writer is None or not news.is_alive:
            return
        for _, kind, skip, edges_ns in news.rows:
            for index, edge_ns in enumerate(edges_ns, start=skip):
                self._mark(self._writer, index, kind, edge_ns, offset_ns)
        self._writer.beat()

    def remove(self) -> None:
        """Remove the copy, without a sign that training has ended."""
        if self._writer is not None:
            self._writer.remove()
            self._writer = None

    def _mark(self, writer: BoardWriter, index: int, kind: int, edge_ns: int, offset_ns: int) -> None:
        if not index:
            self._offset_ns = offset_ns  # one for the whole step, so that its edges stay in order
            writer.begin(kind, edge_ns - offset_ns)
        elif index & 1:
            writer.busy(edge_ns - self._offset_ns)
        else:
            writer.idle(edge_ns - self._offset_ns)


def serve_board(stream: MessageStream, path: str | Path) -> None:
    """Send news of the board at ``path`` as often as they are requested, on the rank's host.

    Raises:
        OSError: the connection is lost.
    """
    source = BoardSource(path)
    while True:
        stream.receive(limit_s=LOST_S, most=len(_REQUEST))
        received_ns = monotonic_ns()
        news = asdict(source.news(BEAT_S))
        stream.send(json.dumps([received_ns, monotonic_ns(), news]).encode())


def follow_board(stream: MessageStream, mirror: BoardMirror, offset: ClockOffset, replied: Callable[[], None]) -> None:
    """Keep a copy of the board that `serve_board` sends, until the connection is lost.

    Args:
        replied: called after each reply.

    Raises:
        OSError: the connection is lost, or the other host has been silent for `LOST_S`.
    """
    while True:
        sent_ns = monotonic_ns()
        stream.send(_REQUEST)
        received_ns, replied_ns, news = json.loads(stream.receive(limit_s=LOST_S, most=MOST_NEWS_BYTES))
        offset.add(sent_ns, received_ns, replied_ns, monotonic_ns())
        mirror.apply(News(**news), offset.ns)
        replied()
