"""Cache of values that a process reuses in its next attempt, derived from settings and measurements."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from weft.comm.exchange import broadcast, gather
from weft.engine.distributed import from_rank_zero

T = TypeVar("T")


class Kept:
    """One value for each name, as long as what it was made from is the same.

    Attributes:
        keeps: whether to cache, as in a process that takes part in several attempts of one run. Off by default: a
            process that trains several models could hit a stale entry.
    """

    def __init__(self) -> None:
        """Start empty, without caching."""
        self.keeps = False
        self._values: dict[str, tuple[Any, Any]] = {}

    def find(self, name: str, made_from: Any) -> Any:
        """Return the value of ``name`` if it was made from an equal ``made_from``, or None."""
        known = self._values.get(name)
        return known[1] if known is not None and known[0] == made_from else None

    def put(self, name: str, made_from: Any, value: Any) -> None:
        """Store a value for ``name``."""
        if self.keeps:
            self._values[name] = deepcopy(made_from), value

    def get(self, name: str, made_from: Any, make: Callable[[], T]) -> T:
        """Return the value of ``name`` if it was made from the same, or the result of ``make``, with its errors."""
        found = self.find(name, made_from)
        if found is None:
            found = make()
            self.put(name, made_from, found)
        return found


def known_to_any(kept: Kept, name: str, made_from: object, make: Callable[[], T], *kinds: type) -> T:
    """Return on every rank a value that any rank has kept under ``name``, otherwise the result of ``make`` on rank 0.

    Collective call. Errors as in `together`.

    Args:
        kept: this rank's.
        made_from: the same on all ranks. Cached values count if they were made from it.
        kinds: dataclasses and enums that the result consists of.
    """
    mine = kept.find(name, made_from)
    has = gather(mine is not None)
    if not all(has):
        mine = broadcast(mine, src=has.index(True), kinds=kinds) if any(has) else from_rank_zero(make, *kinds)
        kept.put(name, made_from, mine)
    return mine
