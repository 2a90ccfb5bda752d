"""The layers that each rank of a route holds: by what they take on its GPUs, within memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any

from weft.pipeline.planner.cluster import Site
from weft.pipeline.planner.cutting import RankSpeed, cut_layers
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.speeds import busy_s, timing_key
from weft.pipeline.planner.workload import LayerWork


class LayerCuts:
    """Cuts of one model for routes through one cluster; what routes have in common is computed once.

    Args:
        max_memory: share of a GPU's memory that may be filled.
    """

    def __init__(self, estimates: Estimates, max_memory: float) -> None:
        self._estimates, self._max_memory = estimates, max_memory
        self._sites, self._work = estimates.cluster.sites, estimates.work
        self._known: dict[Hashable, Any] = {}

    def of(self, shape: Shape, on: Sequence[int]) -> tuple[int, ...] | None:
        """Layers by virtual stage; None if they fit nowhere.

        Args:
            on: the site of each virtual stage.
        """
        sites = [self._sites[number] for number in on]
        kinds = tuple((site.gpu.name, site.gpus_per_host, site.network_bps) for site in sites)
        key = ("layers", kinds, *_memory_key(shape))
        if key not in self._known:
            last = len(on) - 1
            ranks = []
            for rank, site in enumerate(sites):
                sums, before_s, after_s = self._seconds(shape, site)
                extra_s = (before_s if rank == 0 else 0.0) + (after_s if rank == last else 0.0)
                most = self._most(shape, site, first=rank == 0, last=rank == last)
                ranks.append(RankSpeed(sums, extra_s, most // len(shape.legs)))
            self._known[key] = cut_layers(len(self._work.layers), ranks)
        return self._known[key]

    def _seconds(self, shape: Shape, site: Site) -> tuple[list[float], float, float]:
        """Sums of seconds over the layers before each, and those of what comes before and after all."""
        key = ("seconds", *timing_key(shape), site.gpu.name, site.gpus_per_host, site.network_bps)
        if key not in self._known:

            def seconds(work: LayerWork, number: int) -> float:
                return busy_s(self._estimates.stage_cost(work, number, shape, site))

            each = [seconds(layer, 1) for layer in self._work.layers]
            self._known[key] = (
                list(accumulate(each, initial=0.0)),
                seconds(self._work.before, 0),
                seconds(self._work.after, 0),
            )
        return self._known[key]

    def _most(self, shape: Shape, site: Site, *, first: bool, last: bool) -> int:
        """Layers for whose states and one micro-batch a rank has memory."""
        key = ("most", *_memory_key(shape), site.gpu.name, first, last)
        if key not in self._known:
            estimates, number = self._estimates, len(self._work.layers)
            most = self._max_memory * site.gpu.memory_bytes

            def fits(count: int) -> bool:
                work = estimates.rank_work(range(number - count, number), first=first, last=last)
                activations = estimates.activation_bytes(work, count, shape)
                return estimates.memory(work, count, shape, activations).total <= most

            low, high = 0, number
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if fits(middle) else (low, middle - 1)
            self._known[key] = low
        return self._known[key]


def _memory_key(shape: Shape) -> tuple[Any, ...]:
    """What the time and the memory of layers depend on; gradients of one micro-batch need not be added up."""
    return *timing_key(shape), shape.replicas, shape.zero_stage, shape.microbatches == 1
