"""Records of the ranks' work, collected from boards that hold only a few steps, and named windows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from weft.inference.board.reader import BoardReader
from weft.inference.worker.workers import Worker

PAUSE_S = 0.3


class Watch:
    """A thread that collects the work of each served rank until `end`."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.boards = {
            rank: BoardReader(board)
            for worker in workers
            for rank, board in zip(worker.ranks, worker.boards, strict=True)
        }
        self._steps: dict[int, dict[int, list[tuple[float, float]]]] = {rank: {} for rank in self.boards}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def work(self, rank: int) -> list[tuple[float, float]]:
        """Return the times of the rank's computations, in order."""
        return [span for _, spans in sorted(self._steps[rank].items()) for span in spans]

    def end(self) -> None:
        """Stop collecting."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            for rank, board in self.boards.items():
                board.state()
                self._steps[rank].update(board.work())


class Windows:
    """Named spans of time."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, float]]] = {}

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[None]:
        """Record the time of the block under ``name``."""
        begin_s = time.monotonic()
        yield
        self.spans.setdefault(name, []).append((begin_s, time.monotonic()))
