"""Time that is free on all ranks whose devices one worker uses: now, and as it is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from weft.inference.board.reader import SHORTEST_S, BoardReader, BoardState

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Opening:
    """Time that is free on all of a worker's devices; seconds of CLOCK_MONOTONIC.

    Attributes:
        opened_s: since when.
        closes_s: the first rank's bubble to close.
        step: the training step.
        index: the bubble's place in the step, on the rank that closes first.
    """

    opened_s: float
    closes_s: float
    step: int
    index: int


def opening(states: Sequence[BoardState]) -> Opening | None:
    """The bubble that all ranks share now; None if one of them computes or is not known to be idle."""
    bubbles = [state.bubble for state in states]
    known = [bubble for bubble in bubbles if bubble is not None]
    if not known or len(known) < len(bubbles):
        return None
    first = min(known, key=lambda bubble: bubble.closes_s)
    return Opening(max(bubble.opens_s for bubble in known), first.closes_s, first.step, first.index)


class CommonBubbles:
    """The bubbles to come of a group of ranks."""

    def __init__(self, boards: Sequence[BoardReader]) -> None:
        """Of the ranks that write ``boards``; at least one."""
        self._boards = boards

    def upcoming(self, horizon_s: float) -> Spans:
        """Bubbles that all ranks share in the next ``horizon_s``, as `BoardReader.upcoming` gives one rank's."""
        found = reduce(intersection, [board.upcoming(horizon_s) for board in self._boards])
        return [(start_s, end_s) for start_s, end_s in found if end_s - start_s >= SHORTEST_S]


def intersection(spans: Spans, others: Spans) -> list[tuple[float, float]]:
    """Time that lies in both; each is in order and without overlaps of its own."""
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
