"""The plan of a run as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any

from weft.engine.planning.run_plan import RunPlan
from weft.pipeline.action import slot_text
from weft.pipeline.costs import CostModel
from weft.pipeline.schedule import Schedule

_VERSION = 1
_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class ReplicaPlans:
    """The schedules and costs of replicas after an adaptation, which differ between replicas.

    Attributes:
        step: number of steps that were trained before.
        schedules: one for each number in ``counts``.
        counts: micro-batches of each replica.
        costs: measured costs of each replica that the schedules were planned with.
    """

    step: int
    schedules: tuple[Schedule, ...]
    counts: tuple[int, ...]
    costs: tuple[CostModel, ...]


def plan_to_json(plan: RunPlan, replicas: ReplicaPlans | None = None) -> str:
    """Return the plan with its facts as JSON, one line per row of a schedule. Infinite numbers are null.

    Args:
        replicas: schedules and costs that run instead of those of ``plan``.
    """
    schedules = {str(pipelines): cell for pipelines, cell in plan.schedules.items()}
    costs, members = [plan.costs], [_tree(member) | {"schedule": str(member.pipelines)} for member in plan.members]
    if replicas is not None:
        schedules = {str(schedule.num_microbatches): schedule for schedule in replicas.schedules}
        costs = list(dict.fromkeys(replicas.costs))
        for member, count, own in zip(members, replicas.counts, replicas.costs, strict=True):
            member |= {"schedule": str(count), "costs": costs.index(own)}
    facts = {
        field.name: {"value": _tree(getattr(plan.facts, field.name)), "source": plan.facts.sources.get(field.name)}
        for field in fields(plan.facts)
        if field.name != "sources"
    }
    overlap = None
    if plan.overlap is not None:
        overlap = {"together": plan.overlap.together, "cuts": _tree(plan.overlap.cuts), "why": [*plan.overlap.lines()]}
    tree = {
        "format": "weft.plan",
        "version": _VERSION,
        "predicted": {"step_s": plan.step_s, "bubble_share": plan.bubble_share},
        "placement": _tree(plan.placement) | {"rank_stages": plan.placement.rank_stages},
        "layers": plan.split.counts,
        "recompute": [kind.name for kind in plan.recompute],
        "memory": [_tree(memory.zero) | {"activations": memory.activations} for memory in plan.memory],
        "overlap": overlap,
        "schedules": {key: _schedule(schedule) for key, schedule in schedules.items()},
        "members": members,
        "sites": [plan.layout.sites_of(plan.layout.route_of(line)) for line in range(plan.layout.lines)],
        "ranks": [
            [plan.layout.lines_of(stage)[line] for stage in range(plan.layout.stages)]
            for line in range(plan.layout.lines)
        ],
        "costs": _tree(costs[0]),
        "adapted_after": replicas.step if replicas is not None else 0,
        "measured_costs": _tree(costs if replicas is not None else []),
        "collectives": [[stage.reduce_s, stage.unshard_s] for stage in plan.step_costs.stages],
        "facts": facts,
    }
    return _text(tree, "") + "\n"


def _schedule(schedule: Schedule) -> dict[str, Any]:
    rows = [" ".join(map(slot_text, row)) for row in schedule.rows]
    return {"name": schedule.name, "num_microbatches": schedule.num_microbatches, "rows": rows}


def _text(value: Any, indent: str) -> str:
    """Return JSON in which only tables and lists that do not fit one line are broken into lines."""
    line = json.dumps(value, allow_nan=False)
    if len(indent) + len(line) <= _WIDTH or not isinstance(value, dict | list | tuple):
        return line
    inner = f"{indent} "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_text(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _text(entry, inner) for entry in value) + f"\n{indent}]"


def _tree(value: Any) -> Any:
    """Return a value as JSON types: dataclasses as their fields, enums as their names, and keys as strings."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value):
        return {field.name: _tree(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): _tree(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_tree(entry) for entry in value]
    return value


def _key(key: Any) -> str:
    return " ".join(map(_key, key)) if isinstance(key, tuple) else str(_tree(key))
