"""Tells prefill workers when this rank computes and when it waits."""

from __future__ import annotations

import os
import queue
import threading
from typing import Protocol

import torch

from weft.conf.boards import boards_folder
from weft.conf.schema import WeftConfig
from weft.inference.board import BoardWriter, board_path
from weft.pipeline.cell import predict
from weft.pipeline.costs import CostModel
from weft.pipeline.schedule import Schedule

SPARE_EDGES = 64
"""Marks that a step may have beyond two for each slot of the longest row."""


class BubbleMarks(Protocol):
    """What the engine calls as a step goes on; see `weft.inference.board.BoardWriter`."""

    def begin(self, kind: int) -> None:
        """A step begins, with nothing to compute yet."""
        ...

    def busy(self) -> None:
        """The rank starts to compute."""
        ...

    def idle(self) -> None:
        """The rank waits."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...


class DeviceMarks:
    """Marks in the order of the current CUDA stream: each reaches the board when the device does.

    The host runs ahead of the device, so a thread waits for an event per mark. The queue is
    bounded by what the host runs ahead.
    """

    def __init__(self, board: BoardWriter) -> None:
        """Mark on ``board``."""
        self._board = board
        self._marks: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._follow, name="weft-bubbles", daemon=True).start()

    def begin(self, kind: int) -> None:
        """A step begins, with nothing to compute yet."""
        self._put(lambda: self._board.begin(kind))

    def busy(self) -> None:
        """The device will compute from here on."""
        self._put(self._board.busy)

    def idle(self) -> None:
        """The device will have nothing to compute from here on."""
        self._put(self._board.idle)

    def close(self) -> None:
        """The engine ends."""
        self._board.close()
        self._marks.put(None)

    def _put(self, mark: object) -> None:
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._marks.put((event, mark))

    def _follow(self) -> None:
        while (found := self._marks.get()) is not None:
            event, mark = found
            event.synchronize()
            mark()


def open_board(
    config: WeftConfig,
    cell: Schedule,
    costs: CostModel,
    *,
    local_rank: int,
    rank: int,
    global_rank: int,
    device: torch.device,
) -> BubbleMarks | None:
    """This rank's board, with the schedule's own prediction on it; None if bubbles are not published.

    Args:
        cell: the schedule of the rank's DP-cell.
        costs: of one pipeline.
        local_rank: LocalDPRank.
        rank: pipeline rank.

    Raises:
        ValueError: the folder of boards is not this user's alone.
    """
    if not config.inference.enabled:
        return None
    work = [(span.start_s, span.end_s) for span in predict(cell, costs, local_rank).compute[rank]]
    board = BoardWriter(
        board_path(boards_folder(config, os.getuid()), global_rank),
        rank=global_rank,
        plan=work,
        max_edges=2 * max(map(len, cell.rows)) + SPARE_EDGES,
    )
    return DeviceMarks(board) if device.type == "cuda" else board
