"""Bubbles common to all ranks whose devices one worker shares, current and predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from weft.inference.board.reader import SHORTEST_S, BoardReader, BoardState

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Opening:
    """A bubble on all of a worker's devices; seconds of CLOCK_MONOTONIC.

    Attributes:
        closes_s: when the first rank's bubble is predicted to close.
        index: the bubble's index in the step of the rank whose bubble closes first.
    """

    opened_s: float
    closes_s: float
    step: int
    index: int


def opening(states: Sequence[BoardState]) -> Opening | None:
    """Return the current common bubble, or None if a rank computes or its state is unknown."""
    bubbles = [state.bubble for state in states]
    known = [bubble for bubble in bubbles if bubble is not None]
    if not known or len(known) < len(bubbles):
        return None
    first = min(known, key=lambda bubble: bubble.closes_s)
    return Opening(max(bubble.opens_s for bubble in known), first.closes_s, first.step, first.index)


class CommonBubbles:
    """The predicted bubbles of a group of ranks."""

    def __init__(self, boards: Sequence[BoardReader]) -> None:
        """Create the bubbles that the ranks writing ``boards`` (at least one) have in common."""
        self._boards = boards

    def upcoming(self, horizon_s: float) -> Spans | None:
        """Return the common bubbles within ``horizon_s``, or None if training has ended. See `BoardReader.upcoming`."""
        if any(board.ended for board in self._boards):
            return None
        found = reduce(intersection, [board.upcoming(horizon_s) for board in self._boards])
        return [(start_s, end_s) for start_s, end_s in found if end_s - start_s >= SHORTEST_S]


def stage_bubbles(boards: Sequence[str], stages: int) -> list[CommonBubbles]:
    """Return the bubbles of each stage of a worker, whose ranks write ``boards``, stage after stage."""
    readers, each = [BoardReader(board) for board in boards], len(boards) // stages
    return [CommonBubbles(readers[stage * each : (stage + 1) * each]) for stage in range(stages)]


def intersection(spans: Spans, others: Spans) -> list[tuple[float, float]]:
    """Return the intersection of two sorted lists of disjoint spans."""
    found, one, other = [], 0, 0
    while one < len(spans) and other < len(others):
        start = max(spans[one][0], others[other][0])
        end = min(spans[one][1], others[other][1])
        if start < end:
            found.append((start, end))
        if spans[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return found
