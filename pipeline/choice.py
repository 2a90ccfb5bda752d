"""The choice of a placement: compared by what a step costs on each, never decided by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from weft.pipeline.cell import add_relays
from weft.pipeline.costs import CostModel
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.lowering import lower
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate

_WORTH_A_SEARCH = 1.1
"""Placements whose first answer is within so much of the best are searched too."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """`auto`'s answer for one placement.

    Attributes:
        name: of the placement, for people.
        costs: of its virtual stages; of the cell, if it is one.
        step_s: simulated.
        bound_s: which no schedule of this placement beats, whatever memory it takes.
        peak_bytes: saved activations of the fullest rank.
    """

    name: str
    schedule: Schedule
    costs: CostModel
    step_s: float
    bound_s: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was compared.

    Attributes:
        options: shortest step first.
        left_out: by name of a placement, why it was not planned.
    """

    options: tuple[Option, ...]
    left_out: Mapping[str, str]

    @property
    def best(self) -> Option:
        """The one to run."""
        return self.options[0]


def placements(num_ranks: int, sites: tuple[int, ...] = (), chunks: int = 2) -> dict[str, Placement]:
    """The placements to choose from, by name; those that come out alike stand once.

    Inside each of several sites a fold enters and leaves by one rank, so that in a middle site
    both directions share its uplink; an interleaved site enters by its first rank and leaves
    by its last.
    """
    sites = sites or (num_ranks,)
    every = {"straight": Placement.straight(num_ranks, sites)}
    if chunks > 1:
        every["fold"] = Placement.fold(num_ranks, chunks, sites)
        every["interleaved"] = Placement.interleaved(num_ranks, chunks, sites)
    if chunks > 1 and len(sites) > 1:
        every["site_fold"] = Placement.site_fold(sites, chunks)
        every["site_interleaved"] = Placement(sites, "d" * chunks, sites)
    found: dict[str, Placement] = {}
    for name, placement in every.items():
        known = (other.stage_ranks for other in found.values())
        # A rank that hands on to itself is one stage cut in two, which straight has already.
        if num_ranks > 1 and placement.stage_ranks not in known:
            found[name] = placement
    return found or {"straight": every["straight"]}


def choose(
    candidates: Mapping[str, Placement],
    costs_of: Callable[[Placement], CostModel],
    num_microbatches: int,
    *,
    pipelines: int = 1,
    memory_cap_bytes: float | None = None,
    search_seconds: float = 0.0,
) -> Choice:
    """Schedule with `auto` on every placement, and put the shortest step first.

    A placement whose lower bound is longer than what another one takes is left out; the search
    goes to those that come near the best without.

    Args:
        costs_of: costs of one pipeline on a placement; a ValueError leaves the placement out.
        pipelines: of a DP-cell, which is planned as a whole.
        memory_cap_bytes: as in `generate_auto`, the same for all.
        search_seconds: for all together.

    Raises:
        ValueError: there is no schedule on any of them; the message is that of the first.
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
        schedule = generate_auto(placement, num_microbatches, costs, memory_cap_bytes, seconds)
        return Option(
            name=name,
            schedule=schedule,
            costs=costs,
            step_s=simulate(add_relays(lower(schedule), costs), costs).step_s,
            bound_s=bound_s,
            peak_bytes=peak_bytes(schedule, costs),
        )

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
