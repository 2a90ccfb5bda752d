"""Who holds everybody up: judged from each rank's place in its row."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank is in its row; places of one row compare by how far they are.

    Attributes:
        step: the step that it executes or has executed last; 0 before the first.
        done: slots of its row that have ended.
        begun: whether the next slot has begun.
        waits: waits for others that it has entered and left since; odd while it is in one.
    """

    step: int
    done: int = 0
    begun: bool = False
    waits: int = 0
