"""Tables of the cuts of a model into stages, by route and by the ranks' memory for activations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from weft.pipeline.memory import RankMemory
from weft.pipeline.planner.cluster import Site
from weft.pipeline.planner.crossings import local_s
from weft.pipeline.planner.cut_ranks import ROUNDED_UP, Rank, Way, largest, levels_of, smallest
from weft.pipeline.planner.cut_table import CutTable
from weft.pipeline.planner.estimates import FIELDS, Estimates, memory_key
from weft.pipeline.planner.layout import Layout, Shape
from weft.pipeline.planner.memo import SMALL
from weft.pipeline.planner.routes import Route
from weft.pipeline.workload import LayerWork

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

TIGHT = 1.001
"""Levels are left out where they would make a bound longer by less."""


class Cuts:
    """Tables of cuts of one model on one cluster; what routes have in common is computed once.

    Args:
        max_memory: share of a GPU's memory that may be filled.
        hop_s: returns the least seconds in which a micro-batch crosses between two sites.
        held: returns the least sum over layers of the bytes that a micro-batch saves times the seconds that they stay.
    """

    def __init__(
        self,
        estimates: Estimates,
        max_memory: float,
        hop_s: Callable[[Shape, int, int], float],
        held: Callable[[Shape, Route], float],
    ) -> None:
        self._estimates, self._max_memory, self._hop_s, self._held = estimates, max_memory, hop_s, held
        self._sites, self._work, self._memo = estimates.cluster.sites, estimates.work, estimates.memo

    def of(self, layout: Layout) -> list[CutTable]:
        """Return tables that together have all cuts of a layout, sorted by lower bound; empty if no cut fits."""
        ways = layout.ways
        kinds = tuple(
            tuple((self._estimates.kinds[site], held) for site, held in zip(way.sites, way.stages, strict=True))
            for way in ways
        )
        hops = tuple(tuple(self._hop_s(layout, *pair) for pair in pairwise(way.sites)) for way in ways)
        of_route = self._max_memory, kinds, hops, layout.arrangement, layout.microbatches
        key = ("table", *of_route, *memory_key(layout))
        if (found := self._memo.get(key)) is None:
            found = self._tables(layout, ways)
            self._memo.add(key, found, SMALL + sum(table.cells for table in found))
        return found

    def _tables(self, layout: Layout, ways: list[Layout]) -> list[CutTable]:
        """Return one table of all cuts if memory hardly tightens its bound, else several by the memory for activations.

        A schedule of `auto` has one cap for all ranks: what fits the fullest rank, or one micro-batch of another rank.
        Under 1F1B each rank has its own memory, which must fit all micro-batches that the rank holds there.
        """
        parts = [self._of_way(way) for way in ways]
        stages = layout.placed(ways[0].stages).rank_stages
        ends_s = largest([[rank.ends_s for rank in part.ranks] for part in parts])
        whole = CutTable(largest([part.rank_s(inf) for part in parts]), ends_s, stages)
        if whole.step_s == inf:
            return []
        room_bytes = smallest([[rank.room_bytes for rank in part.ranks] for part in parts])
        counts = whole.best_counts()
        cap_bytes = min(whole.at(room_bytes, counts))
        if layout.legs != "d":
            each = (self._held(way, Route(way.sites, way.stages)) for way in ways)
            held = layout.microbatches * max(each) / layout.num_stages
            if held / cap_bytes <= whole.pipeline_s(counts) * TIGHT:
                return [whole]
            saved_bytes = largest([[rank.saved_bytes for rank in part.ranks] for part in parts])
            return self._of_folds(whole, room_bytes, saved_bytes, held)
        capped = CutTable(largest([part.rank_s(cap_bytes) for part in parts]), ends_s, stages)
        if capped.pipeline_s(counts) <= whole.pipeline_s(counts) * TIGHT:
            return [whole]
        least_bytes, levels = levels_of(room_bytes)
        alone = largest([part.alone_s(least_bytes) for part in parts])
        found = [CutTable(whole.rank_s, ends_s, stages, alone)]
        found.append(CutTable(self._held_by_1f1b(whole.rank_s, room_bytes, parts[0]), ends_s, stages))
        for low, high in levels:
            found.append(self._level(parts, room_bytes, (low, high), CutTable([], ends_s, stages)))
        return sorted((one for one in found if one.step_s < inf), key=lambda one: one.step_s)

    @staticmethod
    def _of_folds(whole: CutTable, room_bytes: list[Array], saved_bytes: list[Array], held: float) -> list[CutTable]:
        """Return tables by the memory for activations, of which all ranks together have as many times the cap.

        Args:
            held: seconds of a step times bytes that activations need of each rank, on average.
        """
        import numpy as np

        least_bytes, levels = levels_of(room_bytes)
        alone = [
            np.where(saved > least_bytes, each_s, inf) for saved, each_s in zip(saved_bytes, whole.rank_s, strict=True)
        ]
        most_bytes = max(
            float(saved[each_s < inf].max(initial=0.0)) for saved, each_s in zip(saved_bytes, alone, strict=True)
        )
        found = [CutTable(whole.rank_s, whole.ends_s, whole.rank_stages, alone, held / max(most_bytes, 1.0))]
        for low, high in levels:
            rank_s = [np.where(room >= low, each, inf) for room, each in zip(room_bytes, whole.rank_s, strict=True)]
            marked_s = [np.where(room <= high, each, inf) for room, each in zip(room_bytes, rank_s, strict=True)]
            found.append(CutTable(rank_s, whole.ends_s, whole.rank_stages, marked_s, held / (high * ROUNDED_UP)))
        return sorted((one for one in found if one.step_s < inf), key=lambda one: one.step_s)

    @staticmethod
    def _held_by_1f1b(rank_s: list[Array], room_bytes: list[Array], way: Way) -> list[Array]:
        """Return the ranks' seconds, made infinite where memory does not fit as many micro-batches as 1F1B holds."""
        import numpy as np

        found = []
        for number, (each_s, room, rank) in enumerate(zip(rank_s, room_bytes, way.ranks, strict=True)):
            in_flight = min(way.microbatches, len(rank_s) - number)
            found.append(np.where(room * ROUNDED_UP >= in_flight * rank.saved_bytes, each_s, inf))
        return found

    @staticmethod
    def _level(parts: list[Way], room_bytes: list[Array], level: tuple[float, float], empty: CutTable) -> CutTable:
        """Return the table of cuts whose fullest rank has activation memory within ``level`` (lowest, highest)."""
        import numpy as np

        low, high = level
        rank_s = [
            np.where(room >= low, each_s, inf)
            for room, each_s in zip(room_bytes, largest([part.rank_s(high) for part in parts]), strict=True)
        ]
        marked_s = [np.where(room <= high, each_s, inf) for room, each_s in zip(room_bytes, rank_s, strict=True)]
        return CutTable(rank_s, empty.ends_s, empty.rank_stages, marked_s)

    def _of_way(self, way: Layout) -> Way:
        """Return the bounds of a step that each rank of one route sets, as arrays by layers."""
        placement = way.placed(way.stages)
        last, on = placement.num_stages - 1, way.site_of()
        size = len(self._work.layers) - way.num_stages + 1
        ranks = [
            self._rank(way, site, first=held[0] == 0, last=held[-1] == last).window(rank, size)
            for rank, (site, held) in enumerate(zip(on, placement.rank_stages, strict=True))
        ]
        sent_s, inside_s = local_s(self._estimates, way, min(self._sites[site].bps_of_gpu for site in way.sites))
        hop_s = [inside_s if here == there else self._hop_s(way, here, there) for here, there in pairwise(on)]
        before = self._through(way, placement.rank_stages, ranks, hop_s)
        behind_s = self._behind(ranks, hop_s) if way.legs == "d" else [None] * len(ranks)
        count, busy, held, more = way.microbatches, [], [], []
        sending = [0] * len(ranks)  # activations of a micro-batch that a rank sends inside of its site
        for stage, (here, there) in enumerate(pairwise(placement.stage_ranks)):
            sending[here] += here != there and not placement.crosses_wan(stage)
        least_weight_s = float(ranks[0].weight_s[0].min())
        for rank, (forward_s, input_s), back_s, times in zip(ranks, before, behind_s, sending, strict=True):
            through_s, weights_s = rank.forward_s + rank.input_s, count * rank.weight_s
            after_s = input_s[:, None] + least_weight_s
            busy.append((forward_s[:, None] + count * through_s + weights_s.clip(after_s)).clip(count * times * sent_s))
            more.append(forward_s[:, None] + rank.weight_s)
            if back_s is not None:  # its memory is held until a micro-batch is back
                held.append(through_s + back_s[None, :])
        return Way(ranks, busy, held or None, more, count)

    def _through(
        self, way: Layout, rank_stages: Sequence[Sequence[int]], ranks: list[Rank], hop_s: list[float]
    ) -> list[tuple[Array, Array]]:
        """Return, by rank and its first layer, the least seconds of forwards and input gradients on earlier ranks."""
        import numpy as np

        size, found = len(ranks[0].forward_s), []
        if way.legs == "d":
            forward_s, input_s = np.full(size, inf), np.full(size, inf)
            forward_s[0] = input_s[0] = 0.0
            for rank, hop in zip(ranks, [*hop_s, 0.0], strict=True):
                found.append((forward_s, input_s))
                forward_s = (forward_s[:, None] + rank.forward_s).min(axis=0) + hop
                input_s = (input_s[:, None] + rank.input_s).min(axis=0) + hop
            return found
        ahead_s = accumulate(hop_s, initial=0.0)
        forward_least_s, input_least_s = (
            min(float(getattr(rank, name).min()) for rank in ranks) / len(way.legs) for name in ("forward_s", "input_s")
        )
        if forward_least_s == inf:  # no rank fits the memory
            forward_least_s = input_least_s = 0.0
        for held, hops_s in zip(rank_stages, ahead_s, strict=True):
            each = (hops_s + held[0] * forward_least_s, hops_s + held[0] * input_least_s)
            found.append((np.full(size, each[0]), np.full(size, each[1])))
        return found

    def _behind(self, ranks: list[Rank], hop_s: list[float]) -> list[Array]:
        """Return, by rank and the first layer after it, the least seconds from sending a micro-batch to its return."""
        import numpy as np

        behind_s = np.full(len(ranks[0].forward_s), inf)
        behind_s[-1] = 0.0
        found = [behind_s]
        for rank, hop in zip(reversed(ranks[1:]), reversed(hop_s), strict=True):
            behind_s = (rank.forward_s + rank.input_s + behind_s).min(axis=1) + 2 * hop
            found.append(behind_s)
        return found[::-1]

    def _rank(self, shape: Shape, site: int, *, first: bool, last: bool) -> Rank:
        kind = self._estimates.kinds[site]
        key = ("matrices", self._max_memory, kind, first, last, *memory_key(shape), shape.legs)
        cells = len(Rank.__annotations__) * (len(self._work.layers) + 1) ** 2
        return self._memo.of(key, lambda: self._matrices(shape, self._sites[site], first=first, last=last), cells)

    def _matrices(self, shape: Shape, site: Site, *, first: bool, last: bool) -> Rank:
        import numpy as np

        estimates = self._estimates
        work, number, layers = self._of_ranges(shape.legs == "d", first, last)
        found = [*estimates.stage_seconds(work, number, shape, site)]
        found.append(estimates.collective_s(work, shape, site) + estimates.optimizer_s(work, shape, site))
        room_bytes, saved_bytes = (each[layers] for each in self._rooms(shape, site, first=first, last=last))
        fits = (room_bytes * ROUNDED_UP >= saved_bytes) & (layers >= len(shape.legs))
        forward_s, input_s, weight_s, ends_s = (
            np.where(fits, each[layers] if np.ndim(each) == 1 else each, inf)
            for each in (np.asarray(one, dtype=float) * np.ones(number.shape) for one in found)
        )
        return Rank(forward_s, input_s, weight_s, ends_s, room_bytes, saved_bytes)

    def _of_ranges(self, is_exact: bool, first: bool, last: bool) -> tuple[LayerWork, Array, Array]:
        """Return the work of layer ranges, see `_works`, their numbers of layers alike, and these as a matrix."""

        def compute() -> tuple[LayerWork, Array, Array]:
            import numpy as np

            of: dict[str, Any] = {name: value.copy() for name, value in self._works[is_exact].items()}
            work, counts = self._part(LayerWork(**of), first, last), np.arange(len(self._work.layers) + 1)
            layers = np.maximum(counts[None, :] - counts[:, None], 0)
            return work, counts if np.ndim(work.parameters) == 1 else layers, layers

        return self._memo.of(("ranges", is_exact, first, last), compute)

    @cached_property
    def _works(self) -> dict[bool, dict[str, Array]]:
        """The work of layer ranges: True gives the exact sums, False the least of any layers, by their number.

        If all layers are alike, the exact sums are by their number, too.
        """
        import numpy as np

        layers = self._work.layers
        each = {name: np.array([getattr(layer, name) for layer in layers], dtype=float) for name in FIELDS}
        least = {name: np.concatenate([[0.0], np.cumsum(np.sort(values))]) for name, values in each.items()}
        if len(set(layers)) == 1:
            return {True: least, False: least}
        sums = {name: np.concatenate([[0.0], np.cumsum(values)]) for name, values in each.items()}
        return {True: {name: one[None, :] - one[:, None] for name, one in sums.items()}, False: least}

    def _rooms(self, shape: Shape, site: Site, *, first: bool, last: bool) -> tuple[Array, Array]:
        """Return, by number of layers, the bytes for activations on a rank, and the bytes that a micro-batch saves."""
        import numpy as np

        key, most_bytes = memory_key(shape), self._max_memory * site.gpu.memory_bytes
        rooms, saved = np.zeros(len(self._work.layers) + 1), np.ones(len(self._work.layers) + 1)
        for count in range(1, len(rooms)):
            memory, saved[count] = self._memory(shape, key, (first, last), count)
            rooms[count] = memory.headroom(most_bytes)
            if rooms[count] * ROUNDED_UP < saved[count]:
                rooms[count:] = 0.0
                break
        return rooms, saved

    def fullest(self, shape: Shape, numbers: Iterable[int]) -> int:
        """Return the least number of layers that the fullest rank must hold at these sites, or 0 if no cut fits memory.

        It is a lower bound: each rank takes as many of the layers with the smallest memory as fit. Each layer must fit
        some rank.
        """
        most_bytes = self._most_bytes(numbers)
        key = ("fullest", *memory_key(shape), most_bytes, shape.num_stages)
        return self._memo.of(key, lambda: self._fullest(shape, most_bytes))

    def least_stages(self, shape: Shape, numbers: Iterable[int]) -> int:
        """Return a lower bound of the stages with which a cut may fit, at most those of a shape; 0 if no cut fits.

        All ranks hold as many layers as any of them.
        """
        most_bytes = self._most_bytes(numbers)
        key = ("least stages", *memory_key(shape), most_bytes, shape.num_stages)
        return self._memo.of(key, lambda: self._least_stages(shape, most_bytes))

    def _most_bytes(self, numbers: Iterable[int]) -> float:
        """Return the bytes that may be filled of a GPU at any of these sites, at most."""
        return self._max_memory * max(self._sites[number].gpu.memory_bytes for number in numbers)

    def _least_stages(self, shape: Shape, most_bytes: float) -> int:
        layers = len(self._work.layers)
        for count in sorted({1, 2, shape.num_stages}):  # with fewer hops ranks have fewer messages
            fewer = shape.changed(num_stages=min(count, shape.num_stages))
            most = max(self._most(fewer, most_bytes, end) for end in _ends(fewer.num_stages))
            if most * fewer.num_stages >= layers:
                return -(-layers // most)
        return 0

    def _fullest(self, shape: Shape, most_bytes: float) -> int:
        layers, ends = len(self._work.layers), _ends(shape.num_stages)
        if len(self._different) > 1 and not self._fits_each_layer(shape, most_bytes, ends):
            return 0
        held = [(self._most(shape, most_bytes, end), many) for end, many in ends.items()]
        if not all(count for count, _ in held):
            return 0
        even = -(-layers // shape.num_stages)
        return next(
            (n for n in range(even, layers + 1) if sum(min(n, count) * many for count, many in held) >= layers), 0
        )

    def _fits_each_layer(self, shape: Shape, most_bytes: float, ends: Iterable[tuple[bool, bool]]) -> bool:
        """True if each layer fits one of the ranks, given as (is first, is last)."""
        key = memory_key(shape)

        def compute() -> bool:
            numbers = range(len(self._different))
            return all(any(self._fits(shape, key, most_bytes, end, 1, one) for end in ends) for one in numbers)

        return self._memo.of(("each", *key, most_bytes, shape.legs, min(3, shape.num_stages)), compute)

    def _most(self, shape: Shape, most_bytes: float, end: tuple[bool, bool]) -> int:
        """Return the maximum number of layers on a rank, given as (is first, is last)."""
        key, counts = memory_key(shape), range(1, len(self._work.layers) + 1)
        return self._memo.of(
            ("most", *key, most_bytes, end),
            lambda: bisect_left(counts, True, key=lambda n: not self._fits(shape, key, most_bytes, end, n)),
        )

    def _fits(
        self,
        shape: Shape,
        key: tuple[Hashable, ...],
        most_bytes: float,
        end: tuple[bool, bool],
        count: int,
        layer: int | None = None,
    ) -> bool:
        memory, saved_bytes = self._memory(shape, key, end, count, layer)
        return memory.headroom(most_bytes) * ROUNDED_UP >= saved_bytes

    def _memory(
        self,
        shape: Shape,
        key: tuple[Hashable, ...],
        end: tuple[bool, bool],
        count: int,
        layer: int | None = None,
    ) -> tuple[RankMemory, float]:
        """Return the least memory of a rank with ``count`` layers, and the bytes that a micro-batch saves.

        Args:
            key: `memory_key` of the shape.
            layer: number among the different layers; None takes the least of any layers.
        """
        name = ("held", key, end, count, layer)
        if (found := self._memo.get(name)) is None:
            work = self._least(count, *end) if layer is None else self._part(self._different[layer], *end)
            saved_bytes = max(self._estimates.activation_bytes(work, count, shape), 1.0)
            found = self._estimates.memory(work, count, shape), saved_bytes
            self._memo.add(name, found)
        return found

    @cached_property
    def _different(self) -> list[LayerWork]:
        return list(dict.fromkeys(self._work.layers))

    def _least(self, count: int, first: bool, last: bool) -> LayerWork:
        """Return the least work of a rank with ``count`` layers: the minimum of each field over any layers."""

        def compute() -> LayerWork:
            least: dict[str, Any] = {name: values[count] for name, values in self._works[False].items()}
            return self._part(LayerWork(**{**least, "parameters": int(least["parameters"])}), first, last)

        return self._memo.of(("least", count, first, last), compute)

    def _part(self, layers: LayerWork, first: bool, last: bool) -> LayerWork:
        return layers + self._estimates.ends(first=first, last=last)


def _ends(num_stages: int) -> dict[tuple[bool, bool], int]:
    """Return the number of ranks by whether they are the first and the last."""
    last = num_stages - 1
    return {(rank == 0, rank == last): many for rank, many in ((1, last - 1), (0, 1), (last, 1)) if many > 0}
