"""Observers that are notified of every slot that a rank executes: boards, traces, heartbeats."""

from __future__ import annotations

from typing import Protocol

from weft.pipeline.action import Slot


class SlotObserver(Protocol):
    """Told by the executor, on the thread that launches the work; it must not block.

    Of several, the first is notified first of a beginning and last of an end.
    """

    def step_begins(self, num_microbatches: int) -> None:
        """A step of so many micro-batches begins."""
        ...

    def slot_begins(self, slot: Slot) -> None:
        """The slot's work is about to be launched."""
        ...

    def slot_ends(self, slot: Slot) -> None:
        """The slot's work has been launched; on a CPU it has ended."""
        ...
