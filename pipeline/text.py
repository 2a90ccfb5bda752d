"""Schedules and timelines as plain text for a terminal."""

from __future__ import annotations

from statistics import fmean

from weft.pipeline.action import Slot
from weft.pipeline.costs import CostModel
from weft.pipeline.generators.auto import own_cap_bytes
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.memory import peak_bytes
from weft.pipeline.order import time_slots
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import sampled_steps_s
from weft.pipeline.timeline import Timeline

_MOST_SAMPLES, _SAMPLED_SLOTS = 100, 300_000
"""Steps that `jitter_text` samples, and their slots together."""


def grid_text(schedule: Schedule, *, width: int | None = None) -> str:
    """Return one line per rank and one column per time slot; every slot takes one column.

    Args:
        width: characters per line; columns beyond it are counted instead of shown. None means no limit.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    rows = time_slots(schedule)
    num_columns = max(map(len, rows))
    widths = [
        max((len(_cell(row[column])) for row in rows if column < len(row)), default=1) for column in range(num_columns)
    ]
    shown, room = 0, (width or 10**9) - len("rank 000")
    while shown < num_columns and room >= widths[shown] + 1:
        room -= widths[shown] + 1
        shown += 1
    lines = []
    for rank, row in enumerate(rows):
        cells = [_cell(row[column] if column < len(row) else None).ljust(widths[column]) for column in range(shown)]
        lines.append(f"rank {rank:<3} " + " ".join(cells).rstrip())
    if shown < num_columns:
        lines.append(f"... and {num_columns - shown} more columns")
    return "\n".join(lines)


def _cell(slot: Slot | None) -> str:
    return "." if slot is None else "|".join(map(str, slot))


def timeline_text(timeline: Timeline) -> str:
    """Return step time and bubble share, then one line per rank."""
    lines = [
        f"{timeline.name}: step {timeline.step_s:.6g} s, bubbles {100 * timeline.bubble_share:.1f} %",
        f"{'rank':<6}{'busy s':>12}{'bubbles':>10}{'peak activations':>20}{'live chunks':>13}",
    ]
    for rank in range(timeline.num_ranks):
        idle = 1 - timeline.busy_s[rank] / timeline.step_s if timeline.step_s else 0.0
        lines.append(
            f"{rank:<6}{timeline.busy_s[rank]:>12.6g}{100 * idle:>8.1f} %"
            f"{bytes_text(timeline.peak_bytes[rank]):>20}{timeline.live_microbatches[rank]:>13}"
        )
    return "\n".join(lines)


def answer_text(schedule: Schedule, costs: CostModel, step_s: float, memory_cap_bytes: float | None) -> str:
    """Compare a step with its lower bound, and its activation memory with 1F1B's and with the cap.

    Args:
        schedule: the compute-only schedule as it runs; for a DP-cell, the cell's, with the cell's costs.
        step_s: simulated step time.
    """
    placement = schedule.placement
    problem = Problem(placement, schedule.num_microbatches, costs)
    peak = peak_bytes(schedule, costs)
    usual = max(problem.microbatch_bytes()) * min(placement.single.num_ranks, schedule.num_microbatches)
    times = f"{peak / usual:.2f} times" if usual else "beside"
    cap = f"cap {bytes_text(memory_cap_bytes)}" if memory_cap_bytes else "no cap given"
    if not memory_cap_bytes and schedule.name == "auto":
        own = own_cap_bytes(placement, schedule.num_microbatches, costs)
        cap += f": auto has set {own_cap_text(own, peak)}"
    return (
        f"{bound_text(schedule, costs, step_s)}\n"
        f"activations at the fullest rank: {bytes_text(peak)}, {times} the {bytes_text(usual)} that 1F1B would hold "
        f"({cap})"
    )


def own_cap_text(cap_bytes: float, peak: float) -> str:
    """Describe the cap that `auto` has set, how to change it, and whether it was exceeded.

    Args:
        peak: bytes of activations that the schedule holds on the fullest rank.
    """
    more = peak > cap_bytes * (1 + 1e-9)
    faster = f"; a fixed schedule that holds {bytes_text(peak)} is faster, and was chosen" if more else ""
    return (
        f"{bytes_text(cap_bytes)} of activations on each rank ({cap_bytes:.0f} bytes); "
        f"pipeline.memory_cap_bytes lifts or lowers that{faster}"
    )


def jitter_text(schedule: Schedule, costs: CostModel) -> str:
    """Return the mean and the 95th percentile of a step over sampled durations.

    Args:
        schedule: lowered; for a DP-cell with its relays, and the cell's costs.
    """
    samples = max(1, min(_MOST_SAMPLES, _SAMPLED_SLOTS // sum(map(len, schedule.rows))))
    steps_s = sampled_steps_s(schedule, costs, range(-samples, 0))
    late_s = steps_s[int(0.95 * samples)]
    return f"step {fmean(steps_s):.6g} s, 95th percentile {late_s:.6g} s ({samples} samples)"


def bound_text(schedule: Schedule, costs: CostModel, step_s: float) -> str:
    """Return the distance of a step from the lower bound; the arguments are those of `answer_text`."""
    bound_s = lower_bound_s(Problem(schedule.placement, schedule.num_microbatches, costs))
    above = f"{100 * (step_s / bound_s - 1):.1f} % above" if step_s > bound_s * (1 + 1e-9) else "which is"
    return f"step {step_s:.6g} s, {above} the lower bound of {bound_s:.6g} s for this placement in any memory"


def bytes_text(num_bytes: float) -> str:
    """Return a size as text, such as ``1.5 GiB`` or ``17 B``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.4g} B"
