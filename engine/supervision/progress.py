"""How far an attempt has come, by what is known of its ranks."""

from __future__ import annotations

from weft.engine.supervision.places import Phase
from weft.engine.supervision.watch import Watch

_BEFORE_A_STEP = (Phase.imports, Phase.setup, Phase.first_step, Phase.parked)


def step_under_way(watch: Watch) -> int | None:
    """The step of the rank that is least far, from 1; None before training."""
    return min((seen.report.place.step for seen in watch.ranks.values()), default=0) or None


def first_good_step(watch: Watch, num_ranks: int) -> int | None:
    """A step that every rank has done; None while the first of the attempt is still to come."""
    ranks = watch.ranks.values()
    if len(ranks) < num_ranks or any(seen.report.phase in _BEFORE_A_STEP for seen in ranks):
        return None
    return step_under_way(watch)


def has_plan(watch: Watch) -> bool:
    """Whether the ranks have begun to train, before which they leave their plan in the run's folder."""
    return any(seen.report.phase not in (Phase.imports, Phase.setup, Phase.parked) for seen in watch.ranks.values())
