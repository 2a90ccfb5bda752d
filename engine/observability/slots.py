"""Interfaces of observers that are notified of every slot that a rank executes, such as traces and heartbeats."""

from __future__ import annotations

from typing import Protocol

from weft.pipeline.action import Slot


class SlotObserver(Protocol):
    """Observer of slots. The executor calls it on the thread that launches the work, so it must not block.

    If there are several observers, the first is called first at a beginning and last at an end.
    """

    def step_begins(self, num_microbatches: int) -> None:
        """Note the beginning of a step with its number of micro-batches."""
        ...

    def slot_begins(self, slot: Slot) -> None:
        """Note that the slot's work is about to be launched."""
        ...

    def slot_ends(self, slot: Slot) -> None:
        """Note that the slot's work has been launched. On a CPU it has ended."""
        ...


class BubbleObserver(SlotObserver, Protocol):
    """An observer of slots that publishes when the rank is idle, also in waits between slots."""

    def idle(self) -> None:
        """Note that the rank begins to wait."""
        ...

    def busy(self) -> None:
        """Note that the rank's wait has ended."""
        ...

    def close(self) -> None:
        """Note the end of the engine."""
        ...
