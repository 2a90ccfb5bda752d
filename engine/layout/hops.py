"""The hops of a job (pairs of ranks that exchange tensors), and the DP-cells whose hops share uplinks. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from weft.comm.links import Cell, Hop
from weft.engine.layout.rank_layout import RankLayout
from weft.pipeline.placement import Placement


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
