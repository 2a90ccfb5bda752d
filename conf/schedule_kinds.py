"""Kinds of schedules, and their rules for the configuration, the generators and the tests."""

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
"""Placements with two virtual stages per rank: one on the way down, and one on the way up."""

EVERY_PLACEMENT = tuple(kind for kind in PlacementKind if kind is not PlacementKind.any)


@dataclass(frozen=True, kw_only=True)
class ScheduleRules:
    """Rules of a kind of schedule: its generator, and the features that it supports."""

    generator: str
    """`module.function` under `weft.pipeline.generators`, imported when it is used.

    Empty if a file has the schedule.
    """
    placements: tuple[PlacementKind, ...]
    """Supported placements. The first is the default."""
    microbatches_per_rank: int = 0
    """Minimum number of micro-batches per step, as a multiple of the pipeline ranks."""
    looks_at_costs: bool = False
    """True if the generator takes costs, a memory cap and a search time."""
    goes_in_rounds: bool = False
    """True if ranks run several chunks in rounds.

    The generator then takes the number of micro-batches to launch together, and a straight placement becomes an
    interleaved one.
    """


# This is the functional form, because members are matched by name and `1f1b` is not an identifier.
ScheduleKind = Enum(
    "ScheduleKind",
    {
        "gpipe": ScheduleRules(generator="gpipe.generate_gpipe", placements=EVERY_PLACEMENT),
        "1f1b": ScheduleRules(generator="one_f_one_b.generate_1f1b", placements=(PlacementKind.straight,)),
        "interleaved": ScheduleRules(
            generator="one_f_one_b.generate_interleaved",
            placements=(PlacementKind.interleaved, PlacementKind.straight),
            goes_in_rounds=True,
        ),
        "w": ScheduleRules(generator="w.generate_w", placements=FOLDS),
        "dualpipev": ScheduleRules(
            generator="folded.generate_dualpipev", placements=(PlacementKind.fold,), microbatches_per_rank=2
        ),
        "zbv": ScheduleRules(generator="folded.generate_zbv", placements=(PlacementKind.fold,)),
        "auto": ScheduleRules(
            generator="auto.generate_auto",
            placements=(PlacementKind.fold, *(kind for kind in EVERY_PLACEMENT if kind is not PlacementKind.fold)),
            looks_at_costs=True,
        ),
        "file": ScheduleRules(generator="", placements=EVERY_PLACEMENT),
    },
)
ScheduleKind.__doc__ = "Generator of the schedule."
