"""How far an attempt has come, from what agents report of their ranks' places."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.engine.supervision.places import Phase
from weft.engine.supervision.report import HostReport, RankReport

_BEFORE_A_STEP = (Phase.imports, Phase.setup, Phase.first_step, Phase.parked)


@dataclass
class Progress:
    """The places of an attempt's ranks, as last heard of.

    Attributes:
        num_ranks: of the attempt.
    """

    num_ranks: int
    moved_at: float
    _ranks: dict[int, RankReport] = field(default_factory=dict)

    def observe(self, report: HostReport, now: float) -> None:
        """Take a host's report."""
        for rank in report.ranks:
            before = self._ranks.get(rank.rank)
            if before is None or (before.phase, before.place) != (rank.phase, rank.place):
                self.moved_at = now
            self._ranks[rank.rank] = rank

    def step(self) -> int | None:
        """The step under way, from 1; None before training."""
        return min((rank.place.step for rank in self._ranks.values()), default=0) or None

    def good_step(self) -> int | None:
        """A step that every rank has done; None while the first of the attempt is still to come."""
        ranks = self._ranks.values()
        if len(ranks) < self.num_ranks or any(rank.phase in _BEFORE_A_STEP for rank in ranks):
            return None
        return self.step()
