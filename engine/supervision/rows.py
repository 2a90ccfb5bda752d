"""What every rank of a job executes, read from the plan that the run leaves in its folder; without torch."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

from weft.pipeline.action import parse_slot
from weft.pipeline.cell import pipeline_of
from weft.pipeline.culprit import JobRows, Replica
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


def read_rows(text: str) -> JobRows:
    """The rows in the text of a ``plan.json``; see `weft.engine.planning.plan_file`.

    Raises:
        ValueError: it is no plan, or one of another version of Weft.
    """
    try:
        tree = json.loads(text)
        placement = Placement(
            tuple(tree["placement"]["groups"]), tree["placement"]["legs"], tuple(tree["placement"]["sites"])
        )
        cells = {int(size): _schedule(entry, placement, int(size)) for size, entry in tree["schedules"].items()}
        members = [(member["pipelines"], member["local_rank"]) for member in tree["members"]]
        ranks = [tuple(map(int, row)) for row in tree["ranks"]]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"plan.json: not a plan of this Weft ({error!r})") from error
    alone = {member: pipeline_of(cells[member[0]], member[1]) for member in set(members)}
    replicas = tuple(Replica(alone[member], row) for member, row in zip(members, ranks, strict=True))
    sizes = [pipelines for pipelines, local_rank in members if local_rank == 0]
    firsts = accumulate(sizes, initial=0)
    shared = tuple(tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=False) if size > 1)
    return JobRows(replicas, shared)


def _schedule(entry: dict[str, Any], placement: Placement, pipelines: int) -> Schedule:
    whole = Placement(placement.groups, placement.legs, placement.sites, pipelines)
    rows = tuple(tuple(map(parse_slot, row.split())) for row in entry["rows"])
    if len(rows) != whole.num_ranks:
        raise ValueError(f"schedules: {len(rows)} rows for {whole.num_ranks} ranks")
    return Schedule(entry["name"], whole, entry["num_microbatches"], rows)
