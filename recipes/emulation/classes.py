"""Classes of ranks. All ranks of a class run the same actions at the same times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.comm.emulated.operation_log import EmulationError
from weft.engine.planning.run_plan import RunPlan


@dataclass(frozen=True)
class RankClass:
    """Ranks with the same stages, links, groups and device, at the same position in their groups.

    Attributes:
        kind: properties that determine the ranks' durations: layers of their stages, links, groups, device.
        stages: virtual stages of each of the ranks.
        pipeline_rank: pipeline rank of the ranks.
    """

    kind: tuple[Any, ...]
    stages: tuple[int, ...]
    pipeline_rank: int
    ranks: tuple[int, ...]


def classes_of(
    plan: RunPlan, hosts: Callable[[int], int], device_of: Callable[[int], Any] = lambda stage: None
) -> list[RankClass]:
    """Return the classes of a run's ranks, by pipeline rank.

    Args:
        hosts: returns the number of a rank's host.
        device_of: returns a key that distinguishes the devices of a pipeline rank.
    """
    layout, placement = plan.layout, plan.placement
    found: dict[tuple[Any, ...], list[int]] = {}
    kinds: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    last = placement.num_stages - 1
    for stage in range(layout.stages):
        held = placement.rank_stages[stage]
        layers = tuple((len(plan.split.layers[s]), s == 0, s == last) for s in held)
        links = tuple(
            None if not 0 <= s + step <= last else _link(plan, stage, placement.stage_ranks[s + step])
            for s in held
            for step in (-1, 1)
        )
        spreads = {group: _spread([hosts(rank) for rank in group]) for group in layout.data_groups(stage)}
        for rank in layout.lines_of(stage):
            at = layout.position(rank)
            (spread,) = {spreads[group] for group in spreads if rank in group}
            kind = (layers, links, spread, device_of(stage))
            key = (stage, plan.members[at.line].pipelines, at.context, at.tensor, kind)
            found.setdefault(key, []).append(rank)
            kinds[key] = kind
    return [RankClass(kinds[key], placement.rank_stages[key[0]], key[0], tuple(ranks)) for key, ranks in found.items()]


def representatives(classes: list[RankClass], most: int) -> list[RankClass]:
    """Select at most ``most`` classes: one of every kind, and others spread evenly over the pipeline.

    Raises:
        EmulationError: there are more kinds than ``most``.
    """
    if len(classes) <= most:
        return classes
    of_kind: dict[tuple[Any, ...], list[RankClass]] = {}
    for each in classes:
        of_kind.setdefault(each.kind, []).append(each)
    if len(of_kind) > most:
        raise EmulationError(
            f"--most {most}: ranks are of {len(of_kind)} kinds, each of which needs a real one; raise it"
        )
    chosen = [alike[len(alike) // 2] for alike in of_kind.values()]
    rest = [each for each in classes if each not in chosen]
    left = most - len(chosen)
    chosen += [rest[(2 * place + 1) * len(rest) // (2 * left)] for place in range(left)]
    return sorted(chosen, key=classes.index)


def _link(plan: RunPlan, here: int, there: int) -> str:
    """Return the kind of link between two pipeline ranks: none, site or wan."""
    sites = plan.placement.rank_sites
    if here == there:
        return "none"
    return "site" if sites[here] == sites[there] else "wan"


def _spread(hosts: list[int]) -> tuple[int, ...]:
    """Return the number of ranks on each host, the smallest first."""
    return tuple(sorted(Counter(hosts).values()))
