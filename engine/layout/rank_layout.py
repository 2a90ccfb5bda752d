"""The layout of a job's ranks: their global numbers along named axes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from weft.conf.batch import num_replicas
from weft.conf.schema import WeftConfig
from weft.conf.sites import num_routes, ranks_per_site

AXES = ("route", "stage", "replica", "context", "tensor")
"""Axes that a global rank is counted along, the slowest first. Replicas of one route go through the same sites.
Their ranks of a stage are neighbours, so that their reductions stay inside a node or a site (Atlas section 4.2),
and those that share the work of one micro-batch are nearest. Experts have no axis of their own: they are shared
out among neighbouring ranks of a data group."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A rank along the axes.

    Attributes:
        stage: pipeline rank, which holds one virtual stage or several.
        replica: which micro-batches it reads.
        context: part of the sequence.
        tensor: part of each layer's matrices.
        line: pipeline of ranks that it belongs to: ranks of one line hand micro-batches to each other.
            There are as many as replicas x context x tensor.
        site: follows from the replica and the stage.
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
        sites: pipeline ranks of each site, in pipeline order, route after route. One entry for a single site.
        replicas: of the model.
        context: ranks that share each sequence.
        tensor: ranks that share each layer's matrices.
        expert: ranks that share the experts of a layer, a divisor of replicas x context.
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
            ValueError: they are no multiple of the ranks of a replica.
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
        """Pipeline ranks of one line."""
        return sum(self.sites) // self.routes

    @property
    def lines(self) -> int:
        """Pipelines of ranks, which are the ranks of each stage."""
        return self.replicas * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Members of a data group."""
        return self.replicas * self.context

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return prod(self._sizes.values())

    @property
    def lines_of_route(self) -> int:
        """Pipelines of ranks that go through the same sites."""
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
        """The global ranks that hold a stage or a part of it, by their lines, in ascending order."""
        return tuple(rank for route in range(self.routes) for rank in self.route_lines(route, stage))

    def route_lines(self, route: int, stage: int) -> range:
        """Return the lines of one route."""
        first = (route * self.stages + stage) * self.lines_of_route
        return range(first, first + self.lines_of_route)

    def route_of(self, line: int) -> int:
        """The route of a line."""
        return line // self.lines_of_route

    def site_numbers(self, route: int) -> range:
        """The sites that the replicas of a route go through, in pipeline order."""
        held = self.rank_sites[route * self.stages : (route + 1) * self.stages]
        return range(held[0], held[-1] + 1)

    def sites_of(self, route: int) -> tuple[int, ...]:
        """Pipeline ranks of each of these sites."""
        numbers = self.site_numbers(route)
        return self.sites[numbers.start : numbers.stop]

    @property
    def reference(self) -> int:
        """The route that schedules are planned for, and whose order all replicas follow: the first with most sites.

        Replicas wait for each other inside of a step. The same order of actions on all ranks of a stage prevents
        deadlocks between them.
        """
        return max(range(self.routes), key=lambda route: (len(self.sites_of(route)), -route))

    def nodes_of(self, ranks: tuple[int, ...], hosts: Sequence[int]) -> tuple[int, ...]:
        """The node of each of these ranks, for collectives: its site where replicas are at several, else its host.

        Args:
            hosts: of all ranks.
        """
        if self.routes > 1:
            return tuple(self.position(rank).site for rank in ranks)
        return tuple(hosts[rank] for rank in ranks)

    def tensor_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Ranks that share the matrices of a stage."""
        ranks = self.lines_of(stage)
        return [ranks[first : first + self.tensor] for first in range(0, self.lines, self.tensor)]

    def context_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Ranks of a stage that share the sequences of a micro-batch."""
        data = self.data_groups(stage)
        return [group[first : first + self.context] for group in data for first in range(0, len(group), self.context)]

    def data_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Ranks of a stage that hold the same parts of its matrices: replicas x context of them."""
        return [self.lines_of(stage)[tensor :: self.tensor] for tensor in range(self.tensor)]

    def expert_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Ranks of a stage that share its experts: neighbours, so that those that share matrices are among them."""
        ranks = self.lines_of(stage)
        return [ranks[first : first + self.expert] for first in range(0, self.lines, self.expert)]

    def expert_data_groups(self, stage: int) -> list[tuple[int, ...]]:
        """Return the groups of a stage's ranks that hold the same experts."""
        return [self.lines_of(stage)[first :: self.expert] for first in range(self.expert)]

    def holders(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the ranks with the same part of a parameter as this one, by the axis that cuts it ("" for none)."""
        stage = self.position(rank).stage
        kinds = {
            "": [self.lines_of(stage)],
            "tensor": self.data_groups(stage),
            "expert": self.expert_data_groups(stage),
        }
        return {axis: next(group for group in groups if rank in group) for axis, groups in kinds.items()}

    @property
    def axis_groups(self) -> dict[str, list[tuple[int, ...]]]:
        """Groups of ranks that share the work of a layer, by axis, without axes of one rank."""
        of_stage = {"tensor": self.tensor_groups, "context": self.context_groups, "expert": self.expert_groups}
        sizes = {"tensor": self.tensor, "context": self.context, "expert": self.expert}
        return {
            axis: [ranks for stage in range(self.stages) for ranks in groups(stage)]
            for axis, groups in of_stage.items()
            if sizes[axis] > 1
        }

    @property
    def rank_sites(self) -> tuple[int, ...]:
        """The site of each pipeline rank, route after route."""
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
