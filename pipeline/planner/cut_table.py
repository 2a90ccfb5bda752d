"""The cuts of a model into stages on one route: a lower bound for all cuts, and the cuts below a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_ROUNDED = 1 + 1e-12


@dataclass(frozen=True)
class CutTable:
    """Bounds of a step for cuts of a route, by dynamic programming from the last rank to the first.

    Attributes:
        rank_s: by rank, the lower bound of a step because of this rank, by its first layer and the first after it, as
            in `Rank.window`.
        ends_s: by rank, with the same indices, the seconds that follow the pipeline.
        rank_stages: virtual stages of each rank.
        marked_s: None if the table has all cuts. Otherwise only cuts with at least one marked rank are in it, and these
            are the bounds of marked ranks; infinite where a rank cannot be marked.
        least_s: lower bound of the pipeline for all cuts.
    """

    rank_s: list[Array]
    ends_s: list[Array]
    rank_stages: tuple[tuple[int, ...], ...]
    marked_s: list[Array] | None = None
    least_s: float = 0.0

    @property
    def cells(self) -> int:
        """The number of elements of its arrays, about."""
        return 3 * sum(each.size for each in self.rank_s)

    @property
    def step_s(self) -> float:
        """The lower bound of a step for all cuts and schedules; infinite if no cut fits the memory."""
        pipeline_s = max(self.least_s, float(self._rest(self.marked_s is not None)[0][0]))
        return pipeline_s + float(self._rest_ends_s[0][0])

    def best_counts(self) -> tuple[int, ...]:
        """Return the layers of each rank for the most even of the cuts whose slowest rank is the fastest."""
        limit_s = float(self._rest(self.marked_s is not None)[0][0]) * _ROUNDED
        return next(self._counts(0, 0, (0.0, 0.0), (limit_s, inf, inf), self.marked_s is not None))

    def best(self) -> Iterator[tuple[int, ...]]:
        """Yield the most even of the cuts with the fastest slowest rank.

        One cut is for the pipeline's time. If no rank must be marked, a second is for the time after the pipeline.
        """
        if self.step_s == inf:
            return
        both = [self.best_counts()]
        if self.marked_s is None:
            limit_s = float(self._rest_ends_s[0][0]) * _ROUNDED
            both += [next(self._counts(0, 0, (0.0, 0.0), (inf, limit_s, inf), False))]
        yield from dict.fromkeys(layers for counts in both for layers in self._halved(counts))

    def below(self, limit_s: float) -> Iterator[tuple[int, ...]]:
        """Yield the cuts that may take less than ``limit_s``; on each rank, the most even number of layers is first."""
        for counts in self._counts(0, 0, (self.least_s, 0.0), (inf, inf, limit_s), self.marked_s is not None):
            yield from self._split(counts)

    def pipeline_s(self, counts: Sequence[int]) -> float:
        """Return the least seconds of the pipeline for one cut, by the layers of each rank."""
        return max(self.at(self.rank_s, counts))

    def at(self, values: list[Array], counts: Sequence[int]) -> list[float]:
        """Return each rank's entry of its array for one cut, by the layers of each rank."""
        places = enumerate(zip(values, pairwise([0, *accumulate(counts)]), strict=True))
        return [float(each[start - rank, stop - rank - 1]) for rank, (each, (start, stop)) in places]

    def _rest(self, is_marked: bool) -> list[Array]:
        """Return, by rank and its first layer, the least time of the slowest rank from this one to the last.

        Args:
            is_marked: True if one of these ranks has to be marked.
        """
        return self._rest_marked_s if is_marked else self._rest_s

    @cached_property
    def _rest_s(self) -> list[Array]:
        return _least_of_slowest(self._where_both_fit(self.rank_s))

    @cached_property
    def _rest_ends_s(self) -> list[Array]:
        return _least_of_slowest(self._where_both_fit(self.ends_s))

    @cached_property
    def _rest_marked_s(self) -> list[Array]:
        import numpy as np

        assert self.marked_s is not None
        rest = np.full(len(self.rank_s[0]), inf)
        found = [rest]
        each_s, here_s = self._where_both_fit(self.rank_s), self._where_both_fit(self.marked_s)
        for each, marked, plain in zip(each_s[::-1], here_s[::-1], self._rest_s[:0:-1], strict=True):
            rest = np.minimum(np.maximum(each, rest), np.maximum(marked, plain)).min(axis=1)
            found.append(rest)
        return found[::-1]

    def _where_both_fit(self, seconds: list[Array]) -> list[Array]:
        """Return ``seconds``, made infinite where a rank does not fit the memory during the pipeline or after it."""
        import numpy as np

        return [np.where(fits, each, inf) for fits, each in zip(self._both_fit, seconds, strict=True)]

    @cached_property
    def _both_fit(self) -> list[Array]:
        import numpy as np

        least_s = list(map(np.minimum, self.rank_s, self.marked_s)) if self.marked_s else self.rank_s
        return [np.isfinite(least) & np.isfinite(ends) for least, ends in zip(least_s, self.ends_s, strict=True)]

    def _counts(
        self,
        rank: int,
        start: int,
        most: tuple[float, float],
        limits: tuple[float, float, float],
        is_marked: bool,
    ) -> Iterator[tuple[int, ...]]:
        """Yield the layers by rank of cuts within limits, from one rank and its first layer on.

        Args:
            most: maximum seconds among earlier ranks, for the pipeline and for what follows it.
            limits: limits of the pipeline, of what follows it, and of their sum, which is exclusive.
        """
        if rank == len(self.rank_s):
            yield ()
            return
        size = len(self.rank_s[0])
        even = (size - 1 + len(self.rank_s) - start) / (len(self.rank_s) - rank)
        rest_ends_s, first = self._rest_ends_s[rank + 1], start - rank
        for held in sorted(range(1, size - first + 1), key=lambda held: abs(held - even)):
            place = first, first + held - 1
            ends_s = max(most[1], float(self.ends_s[rank][place]))
            least_ends_s = max(ends_s, float(rest_ends_s[place[1]]))
            for here_s, is_left in self._choices(rank, place, is_marked):
                slowest_s = max(most[0], here_s)
                least_s = max(slowest_s, float(self._rest(is_left)[rank + 1][place[1]]))
                if least_s <= limits[0] and least_ends_s <= limits[1] and least_s + least_ends_s < limits[2]:
                    for counts in self._counts(rank + 1, start + held, (slowest_s, ends_s), limits, is_left):
                        yield (held, *counts)

    def _choices(self, rank: int, place: tuple[int, int], is_marked: bool) -> Iterator[tuple[float, bool]]:
        """Yield the bounds of a rank, unmarked and marked, and True if a later rank still has to be marked."""
        plain_s = float(self.rank_s[rank][place])
        marked_s = float(self.marked_s[rank][place]) if is_marked and self.marked_s else inf
        if marked_s < inf:
            yield marked_s, False
        if marked_s != plain_s:
            yield plain_s, is_marked

    def _halved(self, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the layers by virtual stage, split as evenly as possible on each rank."""
        legs = len(self.rank_stages[0])
        for rounded in range(min(legs, 2)):
            held = [[(count + (place != rounded) * (legs - 1)) // legs for place in range(legs)] for count in counts]
            yield self._by_stage(held)

    def _split(self, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the layers by virtual stage for every way to split each rank's layers."""
        if len(self.rank_stages[0]) == 1:
            yield counts
            return
        ways = [
            sorted(((first, count - first) for first in range(1, count)), key=lambda pair: abs(pair[0] - pair[1]))
            for count in counts
        ]
        for held in product(*ways):
            yield self._by_stage(held)

    def _by_stage(self, held: Sequence[Sequence[int]]) -> tuple[int, ...]:
        layers: dict[int, int] = {}
        for stages, counts in zip(self.rank_stages, held, strict=True):
            layers.update(zip(stages, counts, strict=True))
        return tuple(layers[stage] for stage in sorted(layers))


def _least_of_slowest(rank_s: list[Array]) -> list[Array]:
    """Return, by rank and its first layer, the least time of the slowest rank from this one to the last."""
    import numpy as np

    rest = np.full(len(rank_s[0]), inf)
    rest[-1] = 0.0
    found = [rest]
    for each in reversed(rank_s):
        rest = np.maximum(each, rest).min(axis=1)
        found.append(rest)
    return found[::-1]
