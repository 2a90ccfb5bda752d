"""The layers of each pipeline rank: as equal in time as they can be, within memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from weft.pipeline.costs import even_counts

_HALVINGS = 20
"""Of the interval in which the slowest rank's time lies: to a millionth."""


@dataclass(frozen=True)
class RankSpeed:
    """What layers take on a rank.

    Attributes:
        sums_s: seconds of all layers before each, and of all.
        extra_s: of what the rank has besides layers.
        most: layers that fit its memory.
    """

    sums_s: Sequence[float]
    extra_s: float
    most: int

    def seconds(self, start: int, stop: int) -> float:
        """Of a range of layers."""
        return self.sums_s[stop] - self.sums_s[start] + self.extra_s


def cut_layers(num_layers: int, ranks: Sequence[RankSpeed]) -> tuple[int, ...] | None:
    """Layers by rank with the shortest time on the slowest rank; None if they do not fit.

    An even cut is kept where no other is faster by a thousandth.
    """
    if min(rank.most for rank in ranks) < 1 or sum(rank.most for rank in ranks) < num_layers:
        return None
    even, start, longest_s = tuple(even_counts(num_layers, len(ranks))), 0, 0.0
    for rank, held in zip(ranks, even, strict=True):
        longest_s = max(longest_s, rank.seconds(start, start + held))
        start += held
    best = even if all(held <= rank.most for held, rank in zip(even, ranks, strict=True)) else None
    wanted_s = longest_s * 0.999 if best else sum(rank.seconds(0, num_layers) for rank in ranks)
    low_s, high_s = 0.0, wanted_s
    if (counts := _filled(num_layers, ranks, high_s)) is None:
        return best
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        found = _filled(num_layers, ranks, middle_s)
        if found is None:
            low_s = middle_s
        else:
            high_s, counts = middle_s, found
    return counts


def _filled(num_layers: int, ranks: Sequence[RankSpeed], limit_s: float) -> tuple[int, ...] | None:
    """As many layers on each rank, from the first, as take no longer than the limit."""
    counts: list[int] = []
    start, after = 0, len(ranks)
    for rank in ranks:
        after -= 1
        held = bisect_right(rank.sums_s, rank.sums_s[start] + limit_s - rank.extra_s) - 1 - start
        held = min(held, rank.most, num_layers - start - after)
        if held < 1:
            return None
        counts.append(held)
        start += held
    return tuple(counts) if start == num_layers else None
