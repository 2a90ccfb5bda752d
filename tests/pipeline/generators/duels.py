"""Comparisons of `auto` with every fixed schedule in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.serialization import schedule_from_csv, schedule_to_csv
from weft.pipeline.simulation import simulate

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "1f1b": Placement.straight,
    "interleaved": lambda num_ranks: Placement.interleaved(num_ranks, 2),
    "zbv": Placement.fold,
    "dualpipev": Placement.fold,
    "w": Placement.fold,
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A fixed schedule and `auto` on one pipeline; steps in units of F = I = W = 1."""

    kind: str
    num_ranks: int
    num_microbatches: int
    chunks: int
    """Live chunk activations of the fixed schedule, which are the cap for `auto`."""
    fixed: float
    auto: float


def compare(num_ranks: int, num_microbatches: int) -> Iterator[Comparison]:
    """Compare every fixed kind that supports this number of micro-batches with `auto` under the same cap."""
    for kind, place in PLACEMENTS.items():
        placement = place(num_ranks)
        try:
            fixed = generate(kind, placement, num_microbatches)
        except ValueError:
            continue  # the kind needs more micro-batches
        fixed_step, chunks = exported_step(fixed)
        ours = generate("auto", placement, num_microbatches, memory_cap_bytes=chunks, search_seconds=0.0)
        auto_step, auto_chunks = exported_step(ours)
        assert auto_chunks <= chunks, (kind, placement, num_microbatches)
        yield Comparison(
            kind=kind,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            chunks=chunks,
            fixed=fixed_step,
            auto=auto_step,
        )


def exported_step(schedule: Schedule) -> tuple[float, int]:
    """Simulated step and peak live chunks of the schedule's CSV with unit costs; pairs run as two slots."""
    opened = schedule.with_rows([[(action,) for slot in row for action in slot] for row in schedule.rows])
    read = schedule_from_csv(schedule_to_csv(opened), name=schedule.name)
    timeline = simulate(read, CostModel.unit(schedule.placement.num_stages))
    return timeline.step_s, max(timeline.live_microbatches)
