"""The layout of a job's ranks: their global numbers along named axes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from weft.conf.batch import num_replicas
from weft.conf.schema import WeftConfig
from weft.conf.sites import ranks_per_site

AXES = ("stage", "replica")
"""Axes that a global rank is counted along, the slowest first. Replicas of a stage are neighbours, so
that their reductions stay inside a node or a site (Atlas section 4.2). An axis that splits the work of
one replica (tensor, context, expert) goes behind them, where ranks are nearest."""


@dataclass(frozen=True)
class Position:
    """A rank along the axes.

    Attributes:
        stage: pipeline rank, which holds one virtual stage or several.
        replica: pipeline that it belongs to.
        site: follows from the stage.
    """

    stage: int
    replica: int
    site: int


@dataclass(frozen=True)
class RankLayout:
    """How many ranks there are along each axis.

    Attributes:
        sites: pipeline ranks of each site, in pipeline order; one entry where there is one site.
        replicas: of every pipeline rank.
    """

    sites: tuple[int, ...]
    replicas: int = 1

    @classmethod
    def of(cls, config: WeftConfig, world_size: int) -> RankLayout:
        """That of a run of ``world_size`` processes.

        Raises:
            ValueError: they are no multiple of the stages.
        """
        return cls(ranks_per_site(config) or (config.pipeline.stages,), num_replicas(config, world_size))

    @property
    def stages(self) -> int:
        """Pipeline ranks of one replica."""
        return sum(self.sites)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return prod(self._sizes.values())

    def rank(self, *, stage: int, replica: int) -> int:
        """The global rank at a position."""
        number, at = 0, {"stage": stage, "replica": replica}
        for axis in AXES:
            number = number * self._sizes[axis] + at[axis]
        return number

    def position(self, rank: int) -> Position:
        """Where a global rank is."""
        at: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, at[axis] = divmod(rank, self._sizes[axis])
        return Position(**at, site=self.rank_sites[at["stage"]])

    def replicas_of(self, stage: int) -> tuple[int, ...]:
        """The global ranks that hold the same stage."""
        return tuple(self.rank(stage=stage, replica=replica) for replica in range(self.replicas))

    @property
    def rank_sites(self) -> tuple[int, ...]:
        """The site of each pipeline rank."""
        return tuple(site for site, size in enumerate(self.sites) for _ in range(size))

    @property
    def _sizes(self) -> dict[str, int]:
        return {"stage": self.stages, "replica": self.replicas}
