"""Exclude objects that live as long as the engine from Python's garbage collections."""

from __future__ import annotations

import gc
from functools import cache


@cache
def _program_freezes() -> bool:
    """True if the program had frozen objects before the first step of any engine. Cached: counting takes 60 ms."""
    return gc.get_freeze_count() > 0


class LongLived:
    """Objects that outlive a step, which later collections need not examine.

    Without this, a collection occasionally takes a quarter of a second (MegaScale section 6.3).
    """

    def __init__(self) -> None:
        """Start without frozen objects."""
        self._frozen = False

    def freeze(self) -> None:
        """Freeze all current objects. If the program has frozen objects itself, do nothing."""
        if not _program_freezes() and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._frozen = True

    def release(self) -> None:
        """Let collections examine all objects again."""
        if self._frozen:
            gc.unfreeze()
