"""The cuts of a model into stages: the least that any of them takes on a route, and those that take little."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import inf
from typing import TYPE_CHECKING, Any

from weft.pipeline.planner.cluster import Site
from weft.pipeline.planner.estimates import FIELDS, Estimates
from weft.pipeline.planner.layout import Layout, Shape
from weft.pipeline.planner.speeds import timing_key
from weft.pipeline.planner.workload import LayerWork

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Rank:
    """What a pipeline rank takes, by the first layer that it holds and the first that it does not.

    Attributes:
        forward_s: of a micro-batch; ``input_s`` and ``weight_s`` alike, infinite where it cannot hold the layers.
        ends_s: of a step, for collectives over replicas and the optimiser.
        in_flight: micro-batches for whose activations there is memory.
    """

    forward_s: Array
    input_s: Array
    weight_s: Array
    ends_s: Array
    in_flight: Array


@dataclass(frozen=True)
class CutTable:
    """Bounds of a step for every cut of a route, by dynamic programming from the last rank to the first.

    Attributes:
        rank_s: by rank, what a step takes at least because of it, by its first layer and the first after it.
        ends_s: by rank, alike, what follows the pipeline.
        rest_s: by rank, the least that it and those behind it take at most, by its first layer; ``rest_ends_s`` alike.
        rank_stages: virtual stages of each rank.
    """

    rank_s: list[Array]
    ends_s: list[Array]
    rest_s: list[Array]
    rest_ends_s: list[Array]
    rank_stages: tuple[tuple[int, ...], ...]

    @property
    def step_s(self) -> float:
        """Seconds that no cut and no schedule of it beats; infinite where no cut fits the memory."""
        return float(self.rest_s[0][0] + self.rest_ends_s[0][0])

    def best(self) -> Iterator[tuple[int, ...]]:
        """The most even of the cuts whose slowest rank is the fastest, by the pipeline and by what follows it."""
        if self.step_s == inf:
            return
        both = [self._walk(self.rank_s, self.rest_s), self._walk(self.ends_s, self.rest_ends_s)]
        yield from dict.fromkeys(layers for counts in both for layers in self._halved(counts))

    def below(self, limit_s: float) -> Iterator[tuple[int, ...]]:
        """The cuts that may take less than ``limit_s``, the most even of each rank first."""
        for counts in self._counts(0, 0, 0.0, 0.0, limit_s):
            yield from self._split(counts)

    def _walk(self, rank_s: list[Array], rest_s: list[Array]) -> tuple[int, ...]:
        """Layers by rank of the most even cut that is as good as the best."""
        start, last, counts = 0, len(rank_s[0]) - 1, []
        limit_s = rest_s[0][0] * (1 + 1e-12)
        for rank, each_s in enumerate(rank_s):
            after_s = rest_s[rank + 1]
            fitting = [
                stop
                for stop in range(start + 1, last + 1)
                if each_s[start, stop] <= limit_s and after_s[stop] <= limit_s
            ]
            even = (last - start) / (len(rank_s) - rank)
            stop = min(fitting, key=lambda stop: abs(stop - start - even))
            counts.append(stop - start)
            start = stop
        return tuple(counts)

    def _counts(self, rank: int, start: int, most_s: float, most_ends_s: float, limit_s: float) -> Iterator[Any]:
        if rank == len(self.rank_s):
            yield ()
            return
        last = len(self.rank_s[0]) - 1
        even = (last - start) / (len(self.rank_s) - rank)
        for stop in sorted(range(start + 1, last + 1), key=lambda stop: abs(stop - start - even)):
            here_s = max(most_s, self.rank_s[rank][start, stop])
            here_ends_s = max(most_ends_s, self.ends_s[rank][start, stop])
            least_s = max(here_s, self.rest_s[rank + 1][stop])
            if least_s + max(here_ends_s, self.rest_ends_s[rank + 1][stop]) < limit_s:
                for counts in self._counts(rank + 1, stop, here_s, here_ends_s, limit_s):
                    yield (stop - start, *counts)

    def _halved(self, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Layers by virtual stage, as equal on each rank as they can be."""
        legs = len(self.rank_stages[0])
        for rounded in range(min(legs, 2)):
            held = [[(count + (place != rounded) * (legs - 1)) // legs for place in range(legs)] for count in counts]
            yield self._by_stage(held)

    def _split(self, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Layers by virtual stage, in all ways."""
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


class Cuts:
    """Tables of cuts of one model on one cluster; what routes have in common is computed once.

    Args:
        max_memory: share of a GPU's memory that may be filled.
        hop_s: least seconds of a micro-batch between two sites.
    """

    def __init__(self, estimates: Estimates, max_memory: float, hop_s: Callable[[Shape, int, int], float]) -> None:
        self._estimates, self._max_memory, self._hop_s = estimates, max_memory, hop_s
        self._sites, self._work = estimates.cluster.sites, estimates.work
        self._known: dict[Hashable, Any] = {}

    def of(self, layout: Layout) -> CutTable:
        """The table of a layout, whatever its layers."""
        ways = layout.ways
        kinds = tuple(
            tuple((self._kind(self._sites[site]), held) for site, held in zip(way.sites, way.stages, strict=True))
            for way in ways
        )
        hops = tuple(tuple(self._hop_s(layout, *pair) for pair in pairwise(way.sites)) for way in ways)
        key = ("table", kinds, hops, layout.arrangement, layout.microbatches, *self._memory_key(layout))
        if key not in self._known:
            self._known[key] = self._table(layout, ways)
        return self._known[key]

    def _table(self, layout: Layout, ways: list[Layout]) -> CutTable:
        import numpy as np  # takes longer to load than other commands of the pipeline take

        tables = [self._of_way(way) for way in ways]
        rank_s = [np.maximum.reduce(each) for each in zip(*(rank_s for rank_s, _ in tables), strict=True)]
        ends_s = [np.maximum.reduce(each) for each in zip(*(ends_s for _, ends_s in tables), strict=True)]
        stages = layout.placed(ways[0].stages).rank_stages
        return CutTable(rank_s, ends_s, self._rest(rank_s), self._rest(ends_s), stages)

    @staticmethod
    def _rest(rank_s: list[Array]) -> list[Array]:
        """The least that the slowest of each rank and those behind it takes, by the first layer."""
        import numpy as np

        rest = np.full(len(rank_s[0]), inf)
        rest[-1] = 0.0
        found = [rest]
        for each in reversed(rank_s):
            rest = np.maximum(each, rest).min(axis=1)
            found.append(rest)
        return found[::-1]

    def _of_way(self, way: Layout) -> tuple[list[Array], list[Array]]:
        """What a step takes because of each rank of one route, and what follows it."""
        placement = way.placed(way.stages)
        last, on = placement.num_stages - 1, way.site_of()
        ranks = [
            self._rank(way, self._sites[site], first=held[0] == 0, last=held[-1] == last)
            for site, held in zip(on, placement.rank_stages, strict=True)
        ]
        hop_s = [0.0 if here == there else self._hop_s(way, here, there) for here, there in pairwise(on)]
        before = self._through(way, placement.rank_stages, ranks, hop_s)
        behind_s = self._behind(ranks, hop_s) if way.legs == "d" else None
        count, found = way.microbatches, []
        least_weight_s = float(ranks[0].weight_s[0].min())
        for number, (rank, (forward_s, input_s)) in enumerate(zip(ranks, before, strict=True)):
            through_s, weights_s = rank.forward_s + rank.input_s, count * rank.weight_s
            after_s = input_s[:, None] + least_weight_s
            step_s = count * through_s + weights_s.clip(after_s)
            if behind_s is not None:  # its memory is held until a micro-batch is back
                back_s = through_s + behind_s[number][None, :]
                step_s = step_s.clip(back_s * (count / rank.in_flight) + rank.weight_s)
            found.append(forward_s[:, None] + step_s)
        return found, [rank.ends_s for rank in ranks]

    def _through(
        self, way: Layout, rank_stages: Sequence[Sequence[int]], ranks: list[_Rank], hop_s: list[float]
    ) -> list[tuple[Array, Array]]:
        """By rank and its first layer, the least seconds of forwards, and of input gradients, ahead of it."""
        import numpy as np

        size, found = len(self._work.layers) + 1, []
        if way.legs == "d":
            forward_s, input_s = np.full(size, inf), np.full(size, inf)
            forward_s[0] = input_s[0] = 0.0
            for rank, hop in zip(ranks, [*hop_s, 0.0], strict=True):
                found.append((forward_s, input_s))
                forward_s = (forward_s[:, None] + rank.forward_s).min(axis=0) + hop
                input_s = (input_s[:, None] + rank.input_s).min(axis=0) + hop
            return found
        ahead_s = accumulate(hop_s, initial=0.0)
        forward_least_s = min(float(rank.forward_s.min()) for rank in ranks) / len(way.legs)
        input_least_s = min(float(rank.input_s.min()) for rank in ranks) / len(way.legs)
        for held, hops_s in zip(rank_stages, ahead_s, strict=True):
            each = (hops_s + held[0] * forward_least_s, hops_s + held[0] * input_least_s)
            found.append((np.full(size, each[0]), np.full(size, each[1])))
        return found

    def _behind(self, ranks: list[_Rank], hop_s: list[float]) -> list[Array]:
        """By rank and the first layer after it, the least seconds until a micro-batch is back."""
        import numpy as np

        behind_s = np.full(len(self._work.layers) + 1, inf)
        behind_s[-1] = 0.0
        found = [behind_s]
        for rank, hop in zip(reversed(ranks[1:]), reversed(hop_s), strict=True):
            behind_s = (rank.forward_s + rank.input_s + behind_s).min(axis=1) + 2 * hop
            found.append(behind_s)
        return found[::-1]

    def _rank(self, shape: Shape, site: Site, *, first: bool, last: bool) -> _Rank:
        key = ("rank", self._kind(site), first, last, *self._memory_key(shape), shape.routes, shape.legs)
        if key not in self._known:
            import numpy as np

            estimates, size = self._estimates, len(self._work.layers) + 1
            held = self._works[shape.legs == "d"]
            of: dict[str, Any] = {name: value.copy() for name, value in held.items()}
            work = LayerWork(**of)
            work = work + self._work.before if first else work
            work = work + self._work.after if last else work
            counts = np.arange(size)
            number = counts if np.ndim(work.parameters) == 1 else np.maximum(counts[None, :] - counts[:, None], 0)
            found = [*estimates.stage_seconds(work, number, shape, site)]
            found.append(estimates.collective_s(work, shape, site) + estimates.optimizer_s(work, shape, site))
            held_by = np.maximum(counts[None, :] - counts[:, None], 0)
            fits = self._in_flight(shape, site, first=first, last=last)[held_by]
            fits[counts[None, :] - counts[:, None] < len(shape.legs)] = 0.0
            matrices = [
                np.where(fits > 0, each[held_by] if np.ndim(each) == 1 else each, inf)
                for each in (np.asarray(one, dtype=float) * np.ones(number.shape) for one in found)
            ]
            forward_s, input_s, weight_s, ends_s = matrices
            self._known[key] = _Rank(forward_s, input_s, weight_s, ends_s, np.maximum(fits, 1.0))
        return self._known[key]

    @cached_property
    def _works(self) -> dict[bool, dict[str, Array]]:
        """What layers ask for: exactly, and the least of so many; by their number where all are alike."""
        import numpy as np

        layers = self._work.layers
        each = {name: np.array([getattr(layer, name) for layer in layers], dtype=float) for name in FIELDS}
        least = {name: np.concatenate([[0.0], np.cumsum(np.sort(values))]) for name, values in each.items()}
        if len(set(layers)) == 1:
            return {True: least, False: least}
        sums = {name: np.concatenate([[0.0], np.cumsum(values)]) for name, values in each.items()}
        return {True: {name: one[None, :] - one[:, None] for name, one in sums.items()}, False: least}

    def _in_flight(self, shape: Shape, site: Site, *, first: bool, last: bool) -> Array:
        """By layers, micro-batches for whose activations a rank has memory; 0 where it has none for one."""
        key = ("in flight", *self._memory_key(shape), site.gpu.name, first, last)
        if key not in self._known:
            import numpy as np

            most = self._max_memory * site.gpu.memory_bytes
            found = np.zeros(len(self._work.layers) + 1)
            for count in range(1, len(found)):
                room = self._room(shape, count, most, first=first, last=last)
                if room < 1:
                    break
                found[count] = room
            self._known[key] = found
        return self._known[key]

    def _room(self, shape: Shape, count: int, most: float, *, first: bool, last: bool) -> int:
        least = {name: values[count] for name, values in self._works[False].items()}
        work = LayerWork(**{**least, "parameters": int(least["parameters"])})
        work = work + self._work.before if first else work
        work = work + self._work.after if last else work
        saved = self._estimates.activation_bytes(work, count, shape)
        return int(self._estimates.memory(work, count, shape).room(most) / max(saved, 1.0) * (1 + 1e-9))

    @staticmethod
    def _kind(site: Site) -> Hashable:
        return site.gpu.name, site.gpus_per_host, site.network_bps

    @staticmethod
    def _memory_key(shape: Shape) -> tuple[Any, ...]:
        """What the time and the memory of layers depend on; gradients of one micro-batch need not be added up."""
        return *timing_key(shape), shape.replicas, shape.routes, shape.zero_stage, shape.microbatches == 1
