"""Leaving objects that live as long as the engine out of Python's garbage collections."""

from __future__ import annotations

import gc
from functools import cache


@cache
def _program_freezes() -> bool:
    """True if this program had frozen what it holds by its first engine's first step; counting that takes 60 ms."""
    return gc.get_freeze_count() > 0


class LongLived:
    """Objects that outlive a step, which collections during later steps need not examine.

    That took a quarter of a second now and then (MegaScale section 6.3).
    """

    def __init__(self) -> None:
        """Nothing is left out yet."""
        self._frozen = False

    def freeze(self) -> None:
        """Leave out all that lives now, unless the program has frozen objects itself."""
        if not _program_freezes() and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._frozen = True

    def release(self) -> None:
        """Have collections look at everything again."""
        if self._frozen:
            gc.unfreeze()
