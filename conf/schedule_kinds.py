"""The kinds of schedules, each with the rules that configuration, generators and tests share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PlacementKind(Enum):
    """The assignment of virtual stages to ranks (see `PipelineConfig.placement`)."""

    any = "any"
    straight = "straight"
    interleaved = "interleaved"
    fold = "fold"
    site_fold = "site_fold"
    site_interleaved = "site_interleaved"


FOLDS = (PlacementKind.fold, PlacementKind.site_fold)
"""Placements with two virtual stages per rank, down and back up."""

EVERY_PLACEMENT = tuple(kind for kind in PlacementKind if kind is not PlacementKind.any)


@dataclass(frozen=True, kw_only=True)
class ScheduleRules:
    """The generator of a kind of schedule, and the features that it supports."""

    generator: str
    """`module.function` under `weft.pipeline.generators`, imported on use, or empty if a file holds the rows."""
    placements: tuple[PlacementKind, ...]
    """Supported placements; the first is the default."""
    microbatches_per_rank: int = 0
    """Minimum number of micro-batches per step, as a multiple of the pipeline ranks."""
    looks_at_costs: bool = False
    """True if the generator takes costs, a memory cap and a search time."""
    goes_in_rounds: bool = False
    """True if ranks visit several chunks in rounds: the generator takes the number of micro-batches to
    launch together, and a straight placement becomes an interleaved one."""


# Functional form: members are matched by name, and `1f1b` is not an identifier.
ScheduleKind = Enum(
    "ScheduleKind",
    {
        "gpipe": ScheduleRules(generator="gpipe.generate_gpipe", placements=EVERY_PLACEMENT),
        "1f1b": ScheduleRules(generator="one_f_one_b.generate_1f1b", placements=(PlacementKind.straight,)),
        "interleaved": ScheduleRules(
            generator="interleaved.generate_interleaved",
            placements=(PlacementKind.interleaved, PlacementKind.straight),
            goes_in_rounds=True,
        ),
        "w": ScheduleRules(generator="w.generate_w", placements=FOLDS),
        "dualpipev": ScheduleRules(
            generator="dualpipev.generate_dualpipev", placements=(PlacementKind.fold,), microbatches_per_rank=2
        ),
        "zbv": ScheduleRules(generator="zbv.generate_zbv", placements=(PlacementKind.fold,)),
        "auto": ScheduleRules(
            generator="auto.generate_auto",
            placements=(PlacementKind.fold, *(kind for kind in EVERY_PLACEMENT if kind is not PlacementKind.fold)),
            looks_at_costs=True,
        ),
        "file": ScheduleRules(generator="", placements=EVERY_PLACEMENT),
    },
)
ScheduleKind.__doc__ = "Generator of the schedule."
