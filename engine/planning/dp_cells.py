"""The DP-cells of a job: pipelines of ranks whose uplinks carry each other's transfers between sites."""

from __future__ import annotations

from dataclasses import dataclass

from weft.comm.wan.cell import Cell
from weft.engine.planning.hops import neighbours
from weft.engine.planning.layout import RankLayout
from weft.pipeline.placement import Placement


@dataclass(frozen=True)
class CellMember:
    """A line in its DP-cell.

    Attributes:
        pipelines: of the cell; the last cell may hold fewer than the others.
        local_rank: LocalDPRank, from 0.
    """

    pipelines: int
    local_rank: int

    @classmethod
    def all(cls, layout: RankLayout, size: int) -> list[CellMember]:
        """The lines of a job, in order; where nothing crosses the WAN, cells hold one.

        Args:
            size: ``comm.cell``.
        """
        size = size if len(layout.sites) > 1 else 1
        local_ranks = [line % size for line in range(layout.lines)]
        return [cls(min(size, layout.lines - line + local), local) for line, local in enumerate(local_ranks)]


def cells(placement: Placement, layout: RankLayout, size: int) -> list[Cell]:
    """The DP-cells at every crossing of the WAN: ``size`` lines each, by LocalDPRank."""
    crossings = [(a, b) for a, b in neighbours(placement) if placement.rank_sites[a] != placement.rank_sites[b]]
    return [
        Cell(layout.lines_of(a)[first : first + size], layout.lines_of(b)[first : first + size], number)
        for number, (a, b) in enumerate(crossings)
        for first in range(0, layout.lines, size)
    ]
