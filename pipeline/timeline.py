"""The timeline: predicted or measured start and end of every slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.pipeline.action import Slot


@dataclass(frozen=True, slots=True)
class Span:
    """One slot on one lane. Seconds count from the start of the step."""

    rank: int
    lane: str
    """``compute`` for computation; ``send`` for the rank's time to start a transfer; ``reduce`` for
    collectives over replicas; ``F>3`` or ``B>1`` for a transfer to that rank, from its first byte
    to its arrival (predicted only)."""
    slot: Slot
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """All spans of one step, ordered by start within each rank and lane.

    Attributes:
        name: its origin, such as ``1f1b predicted``.
        num_ranks: number of ranks.
        spans: every slot that took time, including transfers.
        peak_bytes: per rank, the peak activation memory.
        live_microbatches: per rank, the most chunk activations held at once.
    """

    name: str
    num_ranks: int
    spans: tuple[Span, ...]
    peak_bytes: tuple[float, ...]
    live_microbatches: tuple[int, ...]

    @cached_property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of its last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def compute(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank's compute lane."""
        lanes: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            if span.lane == "compute":
                lanes[span.rank].append(span)
        return tuple(map(tuple, lanes))

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds for which each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in lane) for lane in self.compute)

    @property
    def bubble_share(self) -> float:
        """Fraction of all ranks' time without compute; 0 for an empty step."""
        whole_s = self.step_s * self.num_ranks
        return 1.0 - sum(self.busy_s) / whole_s if whole_s else 0.0

    def bubbles(self, rank: int, *, at_least_s: float = 0.0) -> tuple[tuple[float, float], ...]:
        """The bubbles of ``rank``: (start, end) in seconds, in order.

        Args:
            at_least_s: ignore bubbles that are not longer than this.
        """
        found = []
        idle_from = 0.0
        for span in self.compute[rank]:
            if span.start_s - idle_from > at_least_s:
                found.append((idle_from, span.start_s))
            idle_from = max(idle_from, span.end_s)
        if self.step_s - idle_from > at_least_s:
            found.append((idle_from, self.step_s))
        return tuple(found)
