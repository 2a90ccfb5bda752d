"""Publishes to prefill workers when this rank computes and when it waits."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.comm.rts_channel import shorten_switch_interval
from weft.conf.host.threads import Thread
from weft.conf.schema import WeftConfig
from weft.engine.observability.clock import DeviceTimes
from weft.inference.board.layout import board_path, boards_folder
from weft.inference.board.writer import BoardWriter
from weft.pipeline.action import COMPUTE, Op, Slot
from weft.pipeline.timeline import Span

SPARE_EDGES = 64
"""Marks that a step may have beyond two for each slot of the longest row."""
WORK = COMPUTE | {Op.REDUCE_GRAD, Op.STEP}
"""The actions that occupy a rank's device. During the rest of its row other processes may use it."""
CLOSE_S = 10.0
"""Longest wait for a device's last marks."""


class Marks(Protocol):
    """Marks the times of a step: on the host (`BoardWriter`), or in the order of a device's work (`DeviceMarks`)."""

    def begin(self, kind: int) -> None:
        """Mark the beginning of a step, without computations yet."""
        ...

    def busy(self) -> None:
        """Mark that the rank starts to compute."""
        ...

    def idle(self) -> None:
        """Mark that the rank waits."""
        ...

    def replan(self, plan: Sequence[tuple[float, float]]) -> None:
        """Publish the predicted work, (start, end) in seconds, of the schedule of the next steps."""
        ...

    def close(self) -> None:
        """Remove the board."""
        ...


class BubbleObserver:
    """An observer of slots that marks bubbles: a rank is busy in its computations, and idle in between.

    Attributes:
        path: file of the board.
        busy: marks that the rank computes again, outside of slots.
        idle: marks that the rank waits, outside of slots.
        close: removes the board.
    """

    def __init__(self, marks: Marks, path: Path) -> None:
        self._marks, self.path = marks, path
        self.busy, self.idle, self.close = marks.busy, marks.idle, marks.close

    def step_begins(self, num_microbatches: int) -> None:
        """Mark the beginning of a step."""
        self._marks.begin(num_microbatches)

    def replan(self, predicted: Sequence[Span]) -> None:
        """Publish the predicted computations of the schedule that the next steps run."""
        self._marks.replan(work_of(predicted))

    def slot_begins(self, slot: Slot) -> None:
        """Mark the rank as busy, if the slot computes."""
        if slot[0].op in WORK:
            self.busy()

    def slot_ends(self, slot: Slot) -> None:
        """Mark the rank as idle if the slot computed, except after the optimiser's step, when the host still works."""
        if slot[0].op in WORK and slot[0].op is not Op.STEP:
            self.idle()


class Times(Protocol):
    """Events of a device. See `weft.engine.observability.clock.DeviceTimes`."""

    def mark(self) -> Any:
        """Return an event behind the work that is queued now."""
        ...

    def passed_ns(self, event: Any) -> int:
        """Return `time.monotonic_ns` when the device passed ``event``. Waits until it has."""
        ...


class DeviceMarks:
    """Marks in the order of the current CUDA stream, each with the time at which the device reached it.

    The host runs ahead of the device, so a thread waits for an event per mark. Its queue is as long as the host is
    ahead. The thread may write late, because it waits for the interpreter, but the times on the board are exact.
    """

    def __init__(self, board: BoardWriter, times: Times) -> None:
        self._board, self._times = board, times
        self._marks: queue.SimpleQueue = queue.SimpleQueue()
        shorten_switch_interval()
        self._thread = Thread(self._follow, name="weft-bubbles")
        self._thread.start()

    def begin(self, kind: int) -> None:
        """Mark the beginning of a step, without computations yet."""
        self._put(lambda at_ns: self._board.begin(kind, at_ns))

    def busy(self) -> None:
        """Mark that the device starts to compute after the work queued so far."""
        self._put(self._board.busy)

    def idle(self) -> None:
        """Mark that the device is idle after the work queued so far."""
        self._put(self._board.idle)

    def replan(self, plan: Sequence[tuple[float, float]]) -> None:
        """Publish the predicted work of another schedule, after the marks of the steps before."""
        self._put(lambda _: self._board.replan(plan))

    def close(self) -> None:
        """Write the marks that are queued, unless the device hangs, and remove the board."""
        self._marks.put(None)
        self._thread.join(CLOSE_S)
        self._board.close()

    def _put(self, mark: Callable[[int], None]) -> None:
        self._marks.put((self._times.mark(), mark))

    def _follow(self) -> None:
        try:
            while (found := self._marks.get()) is not None:
                event, mark = found
                mark(self._times.passed_ns(event))
        except RuntimeError:  # the device has failed, so readers find no writer
            self._board.close()
            raise


def observe_bubbles(
    config: WeftConfig, rank: int, device: torch.device, *, predicted: Sequence[Span], longest_row: int
) -> BubbleObserver:
    """Open the board of a global rank, and return the observer that marks its bubbles there.

    Args:
        predicted: the rank's computations in a step, as planned.
        longest_row: maximum number of slots of a rank in a step.

    Raises:
        ValueError: the folder of boards is not this user's alone.
    """
    board = BoardWriter(
        board_path(boards_folder(config, os.getuid()), rank),
        rank=rank,
        plan=work_of(predicted),
        max_edges=2 * longest_row + SPARE_EDGES,
    )
    return BubbleObserver(DeviceMarks(board, DeviceTimes(device)) if device.type == "cuda" else board, board.path)


def work_of(predicted: Sequence[Span]) -> list[tuple[float, float]]:
    """Return the beginning and end of each predicted computation."""
    return [(span.start_s, span.end_s) for span in predicted]
