"""Lower bounds of families: shapes that differ in stages, ZeRO and placement, many families at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.pipeline.planner.bounds import Bounds
from weft.pipeline.planner.crossings import local_s
from weft.pipeline.planner.estimates import STEP_BYTES, Estimates, reduced_bytes, timing_key
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.memo import SMALL
from weft.pipeline.planner.request import MOST_CELL, Objective, Request
from weft.pipeline.planner.traffic import Traffic

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class _Best(NamedTuple):
    """The best values of any site: bytes (or bits) per second of a GPU, GPUs of a host, and the price."""

    network: float
    network_bps: float
    inside: float
    memory: float
    gpus_per_host: int
    price: float


class FamilyBounds:
    """Lower bounds of the scores of many families at a time."""

    def __init__(self, estimates: Estimates, bounds: Bounds, traffic: Traffic, request: Request) -> None:
        self._cluster, self._estimates, self._bounds = estimates.cluster, estimates, bounds
        self._traffic, self._request = traffic, request
        self._memo = estimates.memo
        self._own: Hashable = self._memo.of(("families", estimates.known, request.pins.get("cell")), object)

    @cached_property
    def _best(self) -> _Best:
        sites = [site for site in self._cluster.sites if site.gpus]
        network = max(site.network_bps / 8 / site.gpus_per_host for site in sites)
        return _Best(
            network,
            max(site.bps_of_gpu for site in sites),
            max(network, *(site.gpu.scale_up_bytes_per_s for site in sites)),
            max(site.gpu.bytes_per_s for site in sites),
            max(site.gpus_per_host for site in sites),
            min(site.price for site in self._cluster.sites),
        )

    def of(
        self,
        groups: Sequence[Shape],
        group: Array,
        replicas: Array,
        microbatches: Array,
        routes: Array,
        stages: Array,
        *,
        crosses: bool,
    ) -> Array:
        """Return lower bounds of the scores of all layouts with at most this number of stages.

        The arrays have the same size, or one value.

        Args:
            groups: for each group of families, a shape with its micro-batch size and checkpointing; all groups have
                the same degrees.
            group: by family, the number of its group.
            crosses: True if there are more ranks than any site has GPUs for, so that a pipeline crosses at least one
                link. The bounds are then for exactly this number of stages.
        """
        import numpy as np

        family, sizes = groups[0], np.array([one.microbatch_size for one in groups])
        fields = group, replicas, microbatches, routes, stages
        key = (self._own, crosses, *groups, *(field.tobytes() for field in fields))
        if (found := self._memo.get(key)) is None:
            found = self._times(groups, *fields, crosses=crosses)
            self._memo.add(key, found, SMALL + 8 * sum(field.size for field in fields))
        step_s, paid = found
        sequences = replicas * microbatches * sizes[group]
        tokens = sequences * self._estimates.work.sequence_length
        lines = replicas * family.gpus_per_rank
        prices = self._best.price
        if self._request.objective is not Objective.cost:
            return self._request.score_of(step_s, None, lines * prices, 0.0, tokens)
        egress = self._traffic.least_egress_of_families(family, sequences, routes, crosses=crosses)
        bound = self._request.score_of(step_s, None, lines * prices, egress, tokens)
        return np.maximum(bound, (lines * microbatches * paid / 3600 + egress) / tokens)

    def _times(
        self,
        groups: Sequence[Shape],
        group: Array,
        replicas: Array,
        microbatches: Array,
        routes: Array,
        stages: Array,
        *,
        crosses: bool,
    ) -> tuple[Array, Array]:
        """Return lower bounds of the seconds of a step, and of the price of a micro-batch's work. See `of`."""
        import numpy as np

        family = groups[0]
        units, least, slowest_s = map(np.array, zip(*map(self._speeds, groups), strict=True))
        site = np.searchsorted(-units[0], -(replicas // routes), side="right") - 1  # the smallest that has space
        whole_s, through_s, paid = least[group, :, site].T
        slowest_s = np.maximum(slowest_s[group, site, stages], whole_s / stages)
        step_s = np.maximum(microbatches * slowest_s, through_s)
        sent_s, ways_s, cells = map(np.array, zip(*map(self._hops, groups), strict=True))
        most = np.where(routes == 1, np.minimum(replicas, MOST_CELL), 1)
        sent_s, way_s, cell = sent_s[group], ways_s[group, most], cells[group, most]
        if not crosses:  # one rank sends nothing
            local = np.array([local_s(self._estimates, one, self._best.network_bps) for one in groups])
            inside_s, arrived_s = local[group].T
            several_s = through_s + 2 * arrived_s + (microbatches - 1) * inside_s
            if sent_s[0] < inf:  # a link to another site may be faster than a network
                several_s = np.minimum(several_s, through_s + 2 * way_s + (microbatches - 1 / cell) * sent_s)
            step_s = np.minimum(np.maximum(step_s, np.where(stages > 1, several_s, 0.0)), microbatches * whole_s)
        else:
            sending_s = (microbatches - 1 / cell) * sent_s
            step_s = np.maximum(np.maximum(step_s, microbatches * sent_s), through_s + 2 * way_s + sending_s)
        return step_s + self._ends_s(family, replicas, routes, stages), paid

    def _speeds(self, family: Shape) -> tuple[Array, Array, Array]:
        """Return the sites' capacities, the largest first, and the least seconds at sites of at least this capacity.

        The second array has the rows ``whole_s``, ``through_s`` and the price of the work. The third has the seconds of
        the slowest rank, by number of stages.
        """
        key = (self._own, *timing_key(family.changed(zero_stage=1)))
        if (found := self._memo.get(key)) is None:
            import numpy as np

            sites = self._cluster.sites
            units = np.array([site.units(family.gpus_per_rank) for site in sites])
            order = np.argsort(-units, kind="stable")
            # What ZeRO 3 gathers for a micro-batch, other stages do not.
            speeds = self._bounds.speeds.of(family.changed(zero_stage=1))
            rows = [
                (speed.whole_s, speed.through_s, sites[at].price * speed.whole_s, speed.layer_s, speed.after_s)
                for at, speed in ((at, speeds[at]) for at in order)
            ]
            whole_s, through_s, paid, layer_s, after_s = np.minimum.accumulate(np.array(rows), axis=0).T
            slowest_s = [self._bounds.slowest_s(*one) for one in zip(layer_s.tolist(), after_s.tolist(), strict=True)]
            found = units[order], np.array([whole_s, through_s, paid]), np.array(slowest_s)
            self._memo.add(key, found)
        return found

    def _hops(self, family: Shape) -> tuple[float, Array, Array]:
        """Return the seconds of sending over the quickest hop; by replicas that pool, the hop and the DP-cell."""
        import numpy as np

        key = (self._own, "hops", family.tensor, family.context, family.expert, family.microbatch_size)
        if (found := self._memo.get(key)) is None:
            by_cell = [self._bounds.hops(family.changed(replicas=cell)) for cell in range(1, MOST_CELL + 1)]
            ways_s = np.array([0.0, *(hops.least_way_s.get(None, inf) for hops in by_cell)])
            cells = np.array([1, *(hops.cell for hops in by_cell)])
            found = by_cell[0].least_sent_s.get(None, inf), ways_s, cells
            self._memo.add(key, found)
        return found

    def _ends_s(self, family: Shape, replicas: Array, routes: Array, stages: Array) -> Array:
        """Return the least seconds of reducing, gathering and the optimiser, for a rank with an average share.

        All sites count as if each of their properties were the best of any site.
        """
        import numpy as np

        whole, tensor, expert = self._estimates.work.whole, family.tensor, family.expert
        lines = replicas // routes * family.gpus_per_rank
        experts = whole.trained_expert_parameters // stages / expert if expert > 1 else np.zeros(1)
        dense = (whole.trained_parameters // stages - experts * expert) / tensor
        best = self._best
        found = dense * tensor / (replicas * family.gpus_per_rank) * STEP_BYTES / best.memory
        shares = [(dense, tensor), (experts, expert)] if expert > 1 else [(dense, tensor)]
        for weights, apart in shares:
            count = lines // apart
            together = np.minimum(count, max(1, best.gpus_per_host // apart))
            over_s = (1 - 1 / together) / best.inside + (1 / together - 1 / count) / best.network
            found = found + reduced_bytes(family) * weights * over_s
        if np.max(routes) == 1:
            return found
        sent = reduced_bytes(family) * sum(weights / (lines // apart) for weights, apart in shares) / routes
        across_s = np.zeros(np.broadcast(sent, routes).shape)
        for count in set(routes.tolist()) - {1}:
            lines_s = [latency_s + sent * byte_s for latency_s, byte_s in self._estimates.network.best_sites(count)]
            least_s = np.minimum.reduce(lines_s) if lines_s else np.full(across_s.shape, inf)
            across_s = np.where(routes == count, least_s, across_s)
        return found + across_s
