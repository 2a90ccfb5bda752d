"""Values that a process keeps from one attempt for the next: they follow from settings and measurements, and take
time."""

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
        keeps: whether anything is kept, as in a process that takes part in several attempts of one run. One that
            trains this and that may find the same settings in another world.
    """

    def __init__(self) -> None:
        """Nothing yet, and nothing is kept."""
        self.keeps = False
        self._values: dict[str, tuple[Any, Any]] = {}

    def find(self, name: str, made_from: Any) -> Any:
        """The value of ``name`` if it was made from what equals ``made_from``, or None otherwise."""
        known = self._values.get(name)
        return known[1] if known is not None and known[0] == made_from else None

    def put(self, name: str, made_from: Any, value: Any) -> None:
        """Keep a value, instead of the one that ``name`` had."""
        if self.keeps:
            self._values[name] = deepcopy(made_from), value

    def get(self, name: str, made_from: Any, make: Callable[[], T]) -> T:
        """The value of ``name`` if it was made from the same; otherwise of ``make``, whose errors are the caller's."""
        found = self.find(name, made_from)
        if found is None:
            found = make()
            self.put(name, made_from, found)
        return found


def known_to_any(kept: Kept, name: str, made_from: object, make: Callable[[], T], *kinds: type) -> T:
    """Return on every rank a value that any rank has kept under ``name``, otherwise the result of ``make`` on rank 0.

    A collective call; errors as in `together`.

    Args:
        kept: this rank's.
        made_from: the same on all ranks; what was kept counts if it was made from this.
        kinds: dataclasses and enums that the answer is made of.
    """
    mine = kept.find(name, made_from)
    has = gather(mine is not None)
    if not all(has):
        mine = broadcast(mine, src=has.index(True), kinds=kinds) if any(has) else from_rank_zero(make, *kinds)
        kept.put(name, made_from, mine)
    return mine
