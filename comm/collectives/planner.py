"""The planner: chooses a rewrite for each collective by cost, once."""

from __future__ import annotations

from collections.abc import Mapping

from weft.comm.collectives.collective import Collective
from weft.comm.collectives.costs import CollectiveCosts
from weft.comm.collectives.rewrite import Rewrite
from weft.comm.collectives.space import EVEN, Choice, choose
from weft.conf.schema import Partition

UNCUT = ((1.0,),)
_GRANULARITIES: Mapping[Partition, tuple[tuple[float, ...], ...]] = {
    Partition.none: (),
    Partition.primitive: UNCUT,
    Partition.group: UNCUT,
    Partition.workload: EVEN,
}


class Planner:
    """Chooses rewrites; with equal costs all ranks choose the same."""

    def __init__(self, costs: CollectiveCosts | None, partition: Partition = Partition.workload) -> None:
        """Plan with these costs.

        Args:
            costs: costs of the group's links; None leaves collectives unchanged.
            partition: the dimensions to search; each includes those before it.
        """
        self._costs = costs if costs is not None else CollectiveCosts({})
        self._partition = partition if costs is not None else Partition.none
        self.choices: dict[Collective, Choice] = {}
        """The choices so far, with reasons."""

    def __call__(self, collective: Collective) -> Rewrite:
        """The rewrite of ``collective``."""
        if collective not in self.choices:
            self.choices[collective] = self._choose(collective)
        return self.choices[collective].rewrite

    def _choose(self, collective: Collective) -> Choice:
        granularities = _GRANULARITIES[self._partition]
        if not granularities:
            return Choice.plainly(collective)
        meshes = [collective.group.flat] if self._partition is Partition.primitive else None
        return choose(collective, self._costs, meshes=meshes, granularities=granularities)
