"""The timeline: predicted or measured start and end of every slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.pipeline.action import COMPUTE, SENDS, Op, Slot


class Lane(str):
    """A resource of a rank that a span occupies, by its name in files.

    It is `COMPUTE_LANE`, `SEND_LANE`, `REDUCE_LANE` or a `transfer`.
    """

    __slots__ = ()

    @classmethod
    def transfer(cls, direction: str, peer: int) -> Lane:
        """Return the lane of activations (``F``) or gradients (``B``) to rank ``peer``, such as ``F>3``."""
        return cls(f"{direction}>{peer}")

    @property
    def peer(self) -> int | None:
        """The rank that receives the transfer, or None for other lanes."""
        _, is_transfer, peer = self.partition(">")
        return int(peer) if is_transfer else None

    def counted_from(self, rank: int) -> Lane:
        """Return the lane with rank numbers relative to ``rank``."""
        return self if self.peer is None else Lane.transfer(self[0], self.peer - rank)


COMPUTE_LANE = Lane("compute")
"""Computation."""
SEND_LANE = Lane("send")
"""The rank's time to start a transfer."""
REDUCE_LANE = Lane("reduce")
"""Collectives over replicas."""
OFFLOAD_LANE = Lane("offload")
"""Copies of activations to host memory."""
RELOAD_LANE = Lane("reload")
"""Copies of activations back from host memory."""
MEASURED_LANES = {
    **dict.fromkeys(COMPUTE | {Op.STEP}, COMPUTE_LANE),
    **dict.fromkeys(SENDS, SEND_LANE),
    **dict.fromkeys((Op.REDUCE_GRAD, Op.UNSHARD), REDUCE_LANE),
}
"""The lanes of operations in measured timelines. Waits for transfers have none, because they are bubbles."""


@dataclass(frozen=True, slots=True)
class Span:
    """A slot on a lane. Seconds count from the start of the step.

    Predicted transfers last from their first byte to their arrival.

    Attributes:
        label: the name of a span whose slot is empty, because the schedule does not have it.
    """

    rank: int
    lane: Lane
    slot: Slot
    start_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True)
class Timeline:
    """All spans of one step, ordered by start within each rank and lane.

    Attributes:
        name: its origin, such as ``1f1b predicted``.
        spans: every slot that took time, including transfers.
        peak_bytes: per rank, the peak activation memory.
        live_microbatches: per rank, the peak number of chunk activations.
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
            if span.lane == COMPUTE_LANE:
                lanes[span.rank].append(span)
        return tuple(map(tuple, lanes))

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds for which each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in lane) for lane in self.compute)

    @property
    def bubble_share(self) -> float:
        """Fraction of all ranks' time without compute, or 0 for an empty step."""
        whole_s = self.step_s * self.num_ranks
        return 1.0 - sum(self.busy_s) / whole_s if whole_s else 0.0

    def bubbles(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Return the bubbles of ``rank`` in order, as (start, end) in seconds."""
        found = []
        idle_from = 0.0
        for span in self.compute[rank]:
            if span.start_s > idle_from:
                found.append((idle_from, span.start_s))
            idle_from = max(idle_from, span.end_s)
        if self.step_s > idle_from:
            found.append((idle_from, self.step_s))
        return tuple(found)
