"""The planner: how each collective of a group is carried out, chosen once by cost and remembered."""

from __future__ import annotations

from collections.abc import Mapping

from weft.comm.collectives.collective import Collective
from weft.comm.collectives.costs import CollectiveCosts
from weft.comm.collectives.rewrite import Rewrite
from weft.comm.collectives.space import EVEN, Choice, choose
from weft.conf.schema import Partition

WHOLE = ((1.0,),)
_GRANULARITIES: Mapping[Partition, tuple[tuple[float, ...], ...]] = {
    Partition.none: (),
    Partition.primitive: WHOLE,
    Partition.group: WHOLE,
    Partition.workload: EVEN,
}


class Planner:
    """Chooses a rewrite for a collective; equal costs give equal choices on every rank."""

    def __init__(self, costs: CollectiveCosts | None, partition: Partition = Partition.workload) -> None:
        """Plan with these costs.

        Args:
            costs: of the group's links; None leaves collectives as they are.
            partition: the axes that may be used, each with those before it.
        """
        self._costs = costs if costs is not None else CollectiveCosts({})
        self._partition = partition if costs is not None else Partition.none
        self.choices: dict[Collective, Choice] = {}
        """What was chosen, with the reasons."""

    def __call__(self, collective: Collective) -> Rewrite:
        """The way to carry out ``collective``."""
        if collective not in self.choices:
            self.choices[collective] = self._choose(collective)
        return self.choices[collective].rewrite

    def _choose(self, collective: Collective) -> Choice:
        granularities = _GRANULARITIES[self._partition]
        if not granularities:
            return Choice.plainly(collective)
        meshes = [collective.group.flat] if self._partition is Partition.primitive else None
        return choose(collective, self._costs, meshes=meshes, granularities=granularities)
