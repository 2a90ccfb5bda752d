"""Schedule generators: make a schedule from a kind, a placement and a number of micro-batches."""

from __future__ import annotations

from importlib import import_module
from math import inf

from weft.conf.schedule_kinds import ScheduleKind, ScheduleRules
from weft.pipeline.costs import CostModel
from weft.pipeline.limits import check_size
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.validation import check_memory


def generators() -> dict[str, ScheduleRules]:
    """Return the rules of every kind that has a generator, by name."""
    return {kind.name: kind.value for kind in ScheduleKind if kind.value.generator}


def generate(
    kind: str,
    placement: Placement,
    num_microbatches: int,
    *,
    costs: CostModel | None = None,
    memory_cap_bytes: float | None = None,
    search_seconds: float = 2.0,
    launch_together: int = 0,
    jitter_samples: int = 0,
) -> Schedule:
    """Generate a compute-only schedule of ``kind``.

    Args:
        costs: seconds and bytes of each virtual stage; None takes unit costs.
        memory_cap_bytes: limit on the activation memory of any rank. ``auto`` stays below it; a
            fixed kind that exceeds it is refused.
        search_seconds: nominal time for ``auto`` to improve its first schedule.
        launch_together: micro-batches of a chunk that ``interleaved`` launches in a row; 0 means
            one per rank. Other kinds do not work in rounds.
        jitter_samples: number of sampled steps that ``auto`` plans against. See `generate_auto`.

    Raises:
        ValueError: the kind is unknown, or does not support the placement, the number of
            micro-batches or the cap.
    """
    table = generators()
    if kind not in table:
        raise ValueError(f"pipeline.schedule={kind}: not known; choose one of {', '.join(table)}")
    if num_microbatches < 1:
        raise ValueError(f"pipeline.microbatches={num_microbatches}: a step has at least 1 micro-batch")
    check_size(placement.num_stages, num_microbatches)
    if not 0 <= search_seconds < inf:
        raise ValueError(f"pipeline.search_seconds={search_seconds:g}: give seconds of at least 0")
    if memory_cap_bytes is not None and not 0 <= memory_cap_bytes < inf:
        raise ValueError(f"pipeline.memory_cap_bytes={memory_cap_bytes:g}: give bytes of at least 0; 0 is no cap")
    costs = costs or CostModel.unit(placement.num_stages)
    costs.require_stages(placement.num_stages)
    spec = table[kind]
    least = spec.microbatches_per_rank * placement.num_ranks
    if num_microbatches < least:
        raise ValueError(
            f"pipeline.microbatches={num_microbatches}: the {kind} schedule needs at least "
            f"{spec.microbatches_per_rank} x {placement.num_ranks} ranks = {least}; raise it or choose schedule=auto"
        )
    module, _, function = spec.generator.rpartition(".")
    make = getattr(import_module(f"{__name__}.{module}"), function)
    if launch_together and not spec.goes_in_rounds:
        raise ValueError(
            f"pipeline.launch_together={launch_together}: schedule={kind} has no rounds; choose 0 or "
            f"schedule={' or '.join(name for name, other in table.items() if other.goes_in_rounds)}"
        )
    if spec.looks_at_costs:
        return make(
            placement,
            num_microbatches,
            costs=costs,
            memory_cap_bytes=memory_cap_bytes or 0.0,
            search_seconds=search_seconds,
            jitter_samples=jitter_samples,
        )
    schedule = make(placement, num_microbatches, *([launch_together] if spec.goes_in_rounds else []))
    if memory_cap_bytes:
        check_memory(schedule, costs, memory_cap_bytes)
    return schedule
