"""Cache of values, derived from settings and measurements, that a process reuses in its next attempt."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from weft.comm.exchange import broadcast, gather
from weft.engine.distributed import from_rank_zero

T = TypeVar("T")


class Kept:
    """Cache of one value for each name. It is valid only for the inputs from which the value was computed.

    Attributes:
        keeps: whether to cache, as in a process that takes part in several attempts of one run. Off by default: a
            process that trains several models could hit a stale entry.
    """

    def __init__(self) -> None:
        """Start empty, without caching."""
        self.keeps = False
        self._values: dict[str, tuple[Any, Any]] = {}

    def find(self, name: str, made_from: Any) -> Any:
        """Return the value of ``name`` if its inputs equal ``made_from``, otherwise None."""
        known = self._values.get(name)
        return known[1] if known is not None and known[0] == made_from else None

    def put(self, name: str, made_from: Any, value: Any) -> None:
        """Store a value for ``name``, computed from the inputs ``made_from``."""
        if self.keeps:
            self._values[name] = deepcopy(made_from), value

    def get(self, name: str, made_from: Any, make: Callable[[], T]) -> T:
        """Return the value of ``name`` if its inputs equal ``made_from``, otherwise store and return ``make()``."""
        found = self.find(name, made_from)
        if found is None:
            found = make()
            self.put(name, made_from, found)
        return found


def known_to_any(kept: Kept, name: str, made_from: object, make: Callable[[], T], *kinds: type) -> T:
    """Return on every rank the value that some rank has cached under ``name``, otherwise ``make()`` of rank 0.

    Collective call. Errors as in `together`.

    Args:
        kept: this rank's cache.
        made_from: the value's inputs, equal on all ranks. A cached value with other inputs is ignored.
        kinds: dataclasses and enums that the result consists of.
    """
    mine = kept.find(name, made_from)
    has = gather(mine is not None)
    if not all(has):
        mine = broadcast(mine, src=has.index(True), kinds=kinds) if any(has) else from_rank_zero(make, *kinds)
        kept.put(name, made_from, mine)
    return mine
