"""A store of torch.distributed that counts what it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch.distributed as dist

OPERATIONS = (
    "set",
    "get",
    "add",
    "wait",
    "check",
    "compare_set",
    "delete_key",
    "append",
    "multi_get",
    "multi_set",
)


class CountedStore(dist.Store):
    """Hands every operation on to another store.

    Attributes:
        asked: operations so far, by name.
    """

    def __init__(self, store: dist.Store) -> None:
        """Count what ``store`` is asked."""
        super().__init__()
        self.store, self.asked, self._lock = store, Counter[str](), Lock()

    def has_extended_api(self) -> bool:
        """See `torch.distributed.Store`."""
        return self.store.has_extended_api()

    def count(self, operation: str) -> None:
        with self._lock:
            self.asked[operation] += 1


def _counted(operation: str) -> Callable[..., Any]:
    def ask(store: CountedStore, *given: Any) -> Any:
        store.count(operation)
        return getattr(store.store, operation)(*given)

    return ask


for _name in OPERATIONS:
    setattr(CountedStore, _name, _counted(_name))
