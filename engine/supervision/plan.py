"""The parts of the ranks' plan that the driver reads: schedule rows and memory. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from weft.engine.supervision.culprit import JobRows, Replica
from weft.pipeline.action import COMPUTE, parse_slot
from weft.pipeline.cell import pipeline_of
from weft.pipeline.costs import StageCost
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


def shortage(plan: str, replicas: int, *, zero_stage: int) -> str:
    """Return why a number of replicas cannot fit into the devices' memory, or empty if it may.

    With fewer replicas, each has a larger shard of the optimiser's state. Other memory is assumed to be unchanged. The
    estimate is a lower bound, so a run that passes may still run out of memory.

    Args:
        plan: text of the previous attempt's ``plan.json``. Without a readable plan the result is empty.
        zero_stage: ZeRO stage of the run.
    """
    try:
        tree = json.loads(plan)
        before = len(tree["ranks"])
        free = float(tree["facts"]["device_bytes"]["value"])
        most = max(_bytes(rank, before / replicas, zero_stage) for rank in tree["memory"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    if replicas >= before or most <= free:
        return ""
    return f"the fullest rank needs {most / 2**30:.3g} GiB or more, and has {free / 2**30:.3g}"


def _bytes(rank: dict[str, float], times: float, zero_stage: int) -> float:
    """Return the least bytes of a pipeline rank if its shards of optimiser state grow by the factor ``times``."""
    whole = sum(map(float, rank.values()))
    return whole - rank["buffers"] + (times - 1) * (rank["optimizer"] if zero_stage else 0.0)


_COMPUTED = ("forward_s", "input_s", "weight_s")


def read_rows(text: str) -> JobRows:
    """Parse the schedule rows in the text of a ``plan.json``. See `weft.engine.planning.plan_file`.

    Raises:
        ValueError: the text is not a plan of this version of Weft.
    """
    try:
        tree = json.loads(text)
        placement = Placement(
            tuple(tree["placement"]["groups"]), tree["placement"]["legs"], tuple(tree["placement"]["sites"])
        )
        cells = {int(size): _schedule(entry, placement, int(size)) for size, entry in tree["schedules"].items()}
        members = [(member["pipelines"], member["local_rank"]) for member in tree["members"]]
        sites = [tuple(map(int, line)) for line in tree["sites"]]
        ranks = [tuple(map(int, row)) for row in tree["ranks"]]
        stages = tree["costs"]["stages"]
        costs = [StageCost(**{name: cost[name] or 0.0 for name in _COMPUTED}, activation_bytes=0.0) for cost in stages]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"plan.json: not a plan of this Weft ({error!r})") from error
    lines = list(zip(members, sites, strict=True))
    alone = {(member, at): _at_sites(pipeline_of(cells[member[0]], member[1]), at) for member, at in set(lines)}
    busy_s = {id(schedule): _busy_s(schedule, costs) for schedule in alone.values()}
    replicas = tuple(Replica(alone[line], row, busy_s[id(alone[line])]) for line, row in zip(lines, ranks, strict=True))
    sizes = [pipelines for pipelines, local_rank in members if local_rank == 0]
    firsts = accumulate(sizes, initial=0)
    shared = tuple(tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=False) if size > 1)
    return JobRows(replicas, shared)


def _at_sites(schedule: Schedule, sites: tuple[int, ...]) -> Schedule:
    """Return the schedule of a pipeline replica, with the sites of its ranks."""
    return replace(schedule, placement=replace(schedule.placement, sites=sites))


def _busy_s(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """Return the predicted computation seconds of each row, by the plan's costs."""
    actions = [[action for slot in row for action in slot if action.op in COMPUTE] for row in schedule.rows]
    return tuple(sum(costs[action.stage].seconds(action.op) for action in row) for row in actions)


def _schedule(entry: dict[str, Any], placement: Placement, pipelines: int) -> Schedule:
    whole = Placement(placement.groups, placement.legs, placement.sites, pipelines)
    rows = tuple(tuple(map(parse_slot, row.split())) for row in entry["rows"])
    if len(rows) != whole.num_ranks:
        raise ValueError(f"schedules: {len(rows)} rows for {whole.num_ranks} ranks")
    return Schedule(entry["name"], whole, entry["num_microbatches"], rows)
