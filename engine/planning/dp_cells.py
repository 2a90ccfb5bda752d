"""The DP-cells of a job: pipelines of ranks whose uplinks carry each other's transfers between sites."""

from __future__ import annotations

from dataclasses import dataclass

from weft.comm.links import Cell
from weft.engine.planning.hops import crosses, neighbours
from weft.engine.planning.layout import RankLayout
from weft.pipeline.placement import Placement


@dataclass(frozen=True)
class CellMember:
    """A line in its DP-cell.

    Attributes:
        pipelines: of the cell. The last cell may have fewer than the others.
        local_rank: LocalDPRank, from 0.
    """

    pipelines: int
    local_rank: int

    @classmethod
    def all(cls, layout: RankLayout, size: int) -> list[CellMember]:
        """Return the pipeline replicas of a job, in order. Without transfers over the WAN, each cell has one.

        Args:
            size: ``comm.cell``.
        """
        size, lines = size if len(layout.sites) > layout.routes else 1, layout.lines_of_route
        local_ranks = [line % size for line in range(lines)]
        return [cls(min(size, lines - line + local), local) for line, local in enumerate(local_ranks)] * layout.routes


def cells(placement: Placement, layout: RankLayout, size: int) -> list[Cell]:
    """The DP-cells at every crossing of the WAN: ``size`` lines of one route each, by LocalDPRank."""
    pairs = neighbours(placement)
    return [
        Cell(tuple(layout.route_lines(route, a)[some]), tuple(layout.route_lines(route, b)[some]), number)
        for route in range(layout.routes)
        for number, (a, b) in enumerate(pair for pair in pairs if crosses(layout, route, *pair))
        for some in (slice(first, first + size) for first in range(0, layout.lines_of_route, size))
    ]
