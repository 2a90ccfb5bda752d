"""The requirement of folded schedules: two chunks per rank, down and back up."""

from __future__ import annotations

from weft.pipeline.placement import Placement


def require_fold(schedule: str, placement: Placement) -> None:
    """Check that ``placement`` is one fold over all ranks.

    Raises:
        ValueError: it is not; the message says what to choose.
    """
    if placement.legs != "du" or len(placement.groups) != 1:
        raise ValueError(
            f"pipeline.schedule={schedule}: it needs placement=fold (legs 'du' over all ranks), the placement has "
            f"legs {placement.legs!r} over groups {placement.groups}; choose placement=fold or schedule=auto"
        )
