"""The values that searches for one model share, each by what it depends on of the cluster and the request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

from weft.pipeline.workload import ModelWork

MOST_CELLS = 2**25
"""Array elements that are kept at most: 256 MiB. With more, all values are computed anew."""
SMALL = 64
"""Array elements that take as much memory as any other value and its key."""


class Memo(dict[Hashable, Any]):
    """Values by what they depend on, with the model given. Each key begins with the name of a value."""

    def __init__(self) -> None:
        super().__init__()
        self._cells = 0

    def of(self, key: Hashable, compute: Callable[[], Any], cells: int = SMALL) -> Any:
        """Return the value of a key, and compute it at the first time.

        Args:
            cells: number of array elements of the value, about.
        """
        if (found := self.get(key)) is None:
            found = compute()
            self.add(key, found, cells)
        return found

    def add(self, key: Hashable, value: Any, cells: int = SMALL) -> None:
        """Keep a value. See `of`."""
        self._cells += cells
        if self._cells > MOST_CELLS:
            self.clear()
            self._cells = cells
        self[key] = value


@lru_cache(maxsize=2)
def memo_of(work: ModelWork) -> Memo:
    """Return the values of one model."""
    return Memo()
