"""The layout of a job's ranks: global numbers along named axes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from weft.comm.links import Cell, Hop
from weft.conf.batch import num_replicas
from weft.conf.schema import WeftConfig
from weft.conf.sites import num_routes, ranks_per_site
from weft.pipeline.placement import Placement

AXES = ("route", "stage", "replica", "context", "tensor")
"""Axes that a global rank is counted along, the slowest first. Replicas of one route go through the same sites.
Their ranks of a stage are neighbours, so that their reductions stay inside a node or a site (Atlas section 4.2),
and those that share the work of one micro-batch are nearest. Experts have no axis of their own: they are shared
out among neighbouring ranks of a data group."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a rank along the axes.

    Attributes:
        stage: pipeline rank, which holds one virtual stage or several.
        replica: index of the replica, which determines the micro-batches of the rank.
        context: index of the rank's part of each sequence.
        tensor: index of the rank's part of each layer's matrices.
        line: index of the rank's line. A line is a pipeline of ranks that pass micro-batches to each other. There
            are replicas x context x tensor lines.
        site: index of the rank's site, which follows from the replica and the stage.
    """

    stage: int
    replica: int
    context: int = 0
    tensor: int = 0
    line: int
    site: int


@dataclass(frozen=True)
class RankLayout:
    """The numbers of ranks along each axis, and the groups of ranks.

    Attributes:
        sites: number of pipeline ranks at each site, in pipeline order, route after route.
        context: number of ranks that share each sequence.
        tensor: number of ranks that share each layer's matrices.
        expert: number of ranks that share the experts of a layer, a divisor of replicas x context.
        routes: number of routes, each with the same number of replicas and with sites of its own.
    """

    sites: tuple[int, ...]
    replicas: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    routes: int = 1

    @classmethod
    def of(cls, config: WeftConfig, world_size: int) -> RankLayout:
        """Return the layout of a run with ``world_size`` processes.

        Raises:
            ValueError: ``world_size`` is no multiple of a replica's number of ranks.
        """
        return cls(
            ranks_per_site(config) or (config.pipeline.stages,),
            num_replicas(config, world_size),
            config.parallel.context,
            config.parallel.tensor,
            config.parallel.expert,
            num_routes(config.cluster),
        )

    @property
    def stages(self) -> int:
        """Number of pipeline ranks of a line."""
        return sum(self.sites) // self.routes

    @property
    def lines(self) -> int:
        """Number of lines, which is the number of ranks of each stage."""
        return self.replicas * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Number of members of a data group."""
        return self.replicas * self.context

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return prod(self._sizes.values())

    @property
    def lines_of_route(self) -> int:
        """Number of lines of each route."""
        return self.lines // self.routes

    def rank(self, *, stage: int, replica: int = 0, context: int = 0, tensor: int = 0) -> int:
        """Return the global rank at a position."""
        route, replica = divmod(replica, self._sizes["replica"])
        number, at = 0, {"route": route, "stage": stage, "replica": replica, "context": context, "tensor": tensor}
        for axis in AXES:
            number = number * self._sizes[axis] + at[axis]
        return number

    def position(self, rank: int) -> Position:
        """Return the position of a global rank."""
        at: dict[str, int] = {}
        local, rest = rank % self.lines_of_route, rank
        for axis in reversed(AXES):
            rest, at[axis] = divmod(rest, self._sizes[axis])
        route = at.pop("route")
        at["replica"] += route * self._sizes["replica"]
        site = self.rank_sites[route * self.stages + at["stage"]]
        return Position(**at, line=route * self.lines_of_route + local, site=site)

    def lines_of(self, stage: int) -> tuple[int, ...]:
        """Return the global ranks that hold a stage or a part of it, ordered by their lines, which is ascending."""
        return tuple(rank for route in range(self.routes) for rank in self.route_lines(route, stage))

    def route_lines(self, route: int, stage: int) -> range:
        """Return the global ranks that hold a stage or a part of it in the lines of one route."""
        first = (route * self.stages + stage) * self.lines_of_route
        return range(first, first + self.lines_of_route)

    def route_of(self, line: int) -> int:
        """Return the route of a line."""
        return line // self.lines_of_route

    def site_numbers(self, route: int) -> range:
        """Return the numbers of a route's sites, in pipeline order."""
        held = self.rank_sites[route * self.stages : (route + 1) * self.stages]
        return range(held[0], held[-1] + 1)

    def sites_of(self, route: int) -> tuple[int, ...]:
        """Return the number of pipeline ranks at each of a route's sites."""
        numbers = self.site_numbers(route)
        return self.sites[numbers.start : numbers.stop]

    @property
    def reference(self) -> int:
        """The route that schedules are planned for: the first of the routes with the most sites.

        All replicas follow its order of actions. Replicas wait for each other inside a step, and cannot deadlock if all
        ranks of a stage have the same order.
        """
        return max(range(self.routes), key=lambda route: (len(self.sites_of(route)), -route))

    def nodes_of(self, ranks: tuple[int, ...], hosts: Sequence[int]) -> tuple[int, ...]:
        """Return the node of each rank for collectives: its site if there are several routes, otherwise its host.

        Args:
            hosts: host numbers of all ranks.
        """
        if self.routes > 1:
            return tuple(self.position(rank).site for rank in ranks)
        return tuple(hosts[rank] for rank in ranks)

    def tensor_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Return the groups of ranks that share the matrices of a stage."""
        ranks = self.lines_of(stage)
        return [ranks[first : first + self.tensor] for first in range(0, self.lines, self.tensor)]

    def context_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Return the groups of a stage's ranks that share the sequences of a micro-batch."""
        data = self.data_groups(stage)
        return [group[first : first + self.context] for group in data for first in range(0, len(group), self.context)]

    def data_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Return the groups of replicas x context ranks of a stage that hold the same parts of its matrices."""
        return [self.lines_of(stage)[tensor :: self.tensor] for tensor in range(self.tensor)]

    def expert_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Return the groups of consecutive ranks that share a stage's experts."""
        ranks = self.lines_of(stage)
        return [ranks[first : first + self.expert] for first in range(0, self.lines, self.expert)]

    def expert_data_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Return the groups of a stage's ranks that hold the same experts."""
        return [self.lines_of(stage)[first :: self.expert] for first in range(self.expert)]

    def holders(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the ranks with the same part of a parameter as ``rank``, by the axis that cuts it ("" for none)."""
        stage = self.position(rank).stage
        kinds = {
            "": [self.lines_of(stage)],
            "tensor": self.data_groups(stage),
            "expert": self.expert_data_groups(stage),
        }
        return {axis: next(group for group in groups if rank in group) for axis, groups in kinds.items()}

    @property
    def axis_groups(self) -> dict[str, list[tuple[int, ...]]]:
        """The groups of ranks that share the work of a layer, by axis, for axes with several ranks."""
        of_stage = {"tensor": self.tensor_groups, "context": self.context_groups, "expert": self.expert_groups}
        sizes = {"tensor": self.tensor, "context": self.context, "expert": self.expert}
        return {
            axis: [ranks for stage in range(self.stages) for ranks in groups(stage)]
            for axis, groups in of_stage.items()
            if sizes[axis] > 1
        }

    @property
    def rank_sites(self) -> tuple[int, ...]:
        """The number of each pipeline rank's site, route after route."""
        return tuple(site for site, size in enumerate(self.sites) for _ in range(size))

    @property
    def _sizes(self) -> dict[str, int]:
        return {
            "route": self.routes,
            "stage": self.stages,
            "replica": self.replicas // self.routes,
            "context": self.context,
            "tensor": self.tensor,
        }


def hops(placement: Placement, layout: RankLayout) -> tuple[set[Hop], set[Hop]]:
    """Return the hops inside sites, and the hops between sites."""
    inside: set[Hop] = set()
    between: set[Hop] = set()
    for a, b in neighbours(placement):
        for route in range(layout.routes):
            found = between if crosses(layout, route, a, b) else inside
            for here, there in zip(layout.route_lines(route, a), layout.route_lines(route, b), strict=True):
                found.update([(here, there), (there, here)])
    return inside, between


def crosses(layout: RankLayout, route: int, a: int, b: int) -> bool:
    """True if the pipeline ranks ``a`` and ``b`` are at different sites on a route."""
    sites = layout.rank_sites[route * layout.stages : (route + 1) * layout.stages]
    return sites[a] != sites[b]


def neighbours(placement: Placement) -> list[tuple[int, int]]:
    """Return the pairs of pipeline ranks with neighbouring virtual stages, with the lower rank first."""
    return sorted({(min(a, b), max(a, b)) for a, b in pairwise(placement.stage_ranks) if a != b})


@dataclass(frozen=True)
class CellMember:
    """The position of a line (a pipeline of ranks) in its DP-cell.

    Attributes:
        pipelines: number of lines in the cell. The last cell may have fewer than the others.
        local_rank: the line's index in the cell (LocalDPRank), from 0.
    """

    pipelines: int
    local_rank: int

    @classmethod
    def all(cls, layout: RankLayout, size: int) -> list[CellMember]:
        """Return the position of every line of a job, in order. Without transfers over the WAN, each cell has one line.

        Args:
            size: number of lines in a cell (``comm.cell``).
        """
        size, lines = size if len(layout.sites) > layout.routes else 1, layout.lines_of_route
        local_ranks = [line % size for line in range(lines)]
        return [cls(min(size, lines - line + local), local) for line, local in enumerate(local_ranks)] * layout.routes


def dp_cells(placement: Placement, layout: RankLayout, size: int) -> list[Cell]:
    """Return the DP-cells at every hop over the WAN. Each has ``size`` lines of one route, ordered by LocalDPRank."""
    pairs = neighbours(placement)
    return [
        Cell(tuple(layout.route_lines(route, a)[some]), tuple(layout.route_lines(route, b)[some]), number)
        for route in range(layout.routes)
        for number, (a, b) in enumerate(pair for pair in pairs if crosses(layout, route, *pair))
        for some in (slice(first, first + size) for first in range(0, layout.lines_of_route, size))
    ]
