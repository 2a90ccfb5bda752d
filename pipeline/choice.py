"""The choice of a placement: schedule a step on each candidate and take the shortest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from weft.pipeline.cell import add_relays
from weft.pipeline.costs import CostModel
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.lowering import lower
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import LAYOUTS, Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import sampled_steps_s, simulate

_WORTH_A_SEARCH = 1.1
"""The search also improves placements whose first step is at most this many times the best."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """`auto`'s schedule for one placement.

    Attributes:
        name: label of the placement.
        costs: costs of its virtual stages; for a DP-cell, of the whole cell.
        step_s: simulated step time; with samples, their mean.
        bound_s: lower bound on the step time of any schedule of this placement in any memory.
        peak_bytes: activation memory of the fullest rank.
    """

    name: str
    schedule: Schedule
    costs: CostModel
    step_s: float
    bound_s: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The result of comparing placements.

    Attributes:
        options: shortest step first.
        left_out: placements without a schedule: the reason by name.
    """

    options: tuple[Option, ...]
    left_out: Mapping[str, str]

    @property
    def best(self) -> Option:
        """The option with the shortest step."""
        return self.options[0]


def placements(num_ranks: int, sites: tuple[int, ...] = (), chunks: int = 2) -> dict[str, Placement]:
    """Return the distinct placements to choose from, by name.

    With several sites, a fold enters and leaves each site by the same rank, so in a middle site
    both directions share that rank's uplink; an interleaved site is entered by its first rank
    and left by its last.
    """
    found: dict[str, Placement] = {}
    for name in LAYOUTS:
        placement = Placement.named(name, num_ranks, sites, chunks)
        known = (other.stage_ranks for other in found.values())
        # Two successive stages on one rank are one stage cut in two, which straight already covers.
        if num_ranks > 1 and placement.stage_ranks not in known:
            found[name] = placement
    return found or {"straight": Placement.straight(num_ranks, sites)}


def choose(
    candidates: Mapping[str, Placement],
    costs_of: Callable[[Placement], CostModel],
    num_microbatches: int,
    *,
    pipelines: int = 1,
    memory_cap_bytes: float | None = None,
    search_seconds: float = 0.0,
    jitter_samples: int = 0,
    schedule_of: Callable[[Placement, CostModel], Schedule] | None = None,
) -> Choice:
    """Schedule every placement with `auto`, and order them by step time.

    A placement is left out if its lower bound exceeds another placement's step. The search then
    improves those whose step is close to the best.

    Args:
        costs_of: the costs of one pipeline on a placement; a ValueError leaves the placement out.
        pipelines: pipelines of the DP-cell, which is scheduled as a whole.
        memory_cap_bytes: see `generate_auto`; for every placement.
        search_seconds: nominal search time over all placements.
        jitter_samples: number of sampled steps against which every placement is planned, and of others that compare
            them. 0 plans and compares by the medians.
        schedule_of: schedules a placement instead of `generate_auto`; a ValueError leaves it out.

    Raises:
        ValueError: no placement has a schedule; the message is the first placement's.
    """
    left_out: dict[str, str] = {}
    found: dict[str, Option] = {}
    known: list[tuple[float, str, Placement, CostModel]] = []
    for name, placement in candidates.items():
        placement = replace(placement, pipelines=pipelines)
        try:
            costs = costs_of(placement.single).for_cell(pipelines)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        bound_s = lower_bound_s(Problem(placement, num_microbatches, costs))
        known.append((bound_s, name, placement, costs))

    def plan(placement: Placement, costs: CostModel, name: str, bound_s: float, seconds: float) -> Option:
        if schedule_of is None:
            schedule = generate_auto(placement, num_microbatches, costs, memory_cap_bytes, seconds, jitter_samples)
        else:
            schedule = schedule_of(placement, costs)
        return _option(name, schedule, costs, bound_s, jitter_samples)

    for bound_s, name, placement, costs in sorted(known, key=lambda entry: entry[:2]):
        best_s = min((option.step_s for option in found.values()), default=float("inf"))
        if bound_s > best_s:
            left_out[name] = f"takes at least {bound_s:.6g} s"
            continue
        try:
            found[name] = plan(placement, costs, name, bound_s, 0.0)
        except ValueError as error:
            left_out[name] = str(error)
    if not found:
        raise ValueError(next(iter(left_out.values())))
    best_s = min(option.step_s for option in found.values())
    worth = [o for o in found.values() if o.step_s <= _WORTH_A_SEARCH * best_s and o.step_s > o.bound_s * (1 + 1e-6)]
    for option in worth if search_seconds else ():
        again = plan(option.schedule.placement, option.costs, option.name, option.bound_s, search_seconds / len(worth))
        found[option.name] = min(option, again, key=lambda o: o.step_s)
    options = tuple(sorted(found.values(), key=lambda o: (o.step_s, o.schedule.placement.num_stages, o.peak_bytes)))
    return Choice(options=options, left_out=left_out)


def _option(name: str, schedule: Schedule, costs: CostModel, bound_s: float, jitter_samples: int) -> Option:
    lowered = add_relays(lower(schedule), costs)
    samples = range(-jitter_samples, 0)  # the planner has seen none of them
    return Option(
        name=name,
        schedule=schedule,
        costs=costs,
        step_s=fmean(sampled_steps_s(lowered, costs, samples)) if samples else simulate(lowered, costs).step_s,
        bound_s=bound_s,
        peak_bytes=peak_bytes(schedule, costs),
    )
