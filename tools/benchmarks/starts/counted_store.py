"""A store of torch.distributed that counts what it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from threading import Lock

import torch.distributed as dist


class CountedStore(dist.Store):
    """Hands every operation on to another store.

    Attributes:
        asked: operations so far, by name.
    """

    def __init__(self, store: dist.Store) -> None:
        """Count what ``store`` is asked."""
        super().__init__()
        self.store, self.asked, self._lock = store, Counter[str](), Lock()

    def _count(self, operation: str) -> None:
        with self._lock:
            self.asked[operation] += 1

    def set(self, key: str, value: str) -> None:
        """See `torch.distributed.Store`."""
        self._count("set")
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store`."""
        self._count("get")
        return self.store.get(key)

    def add(self, key: str, value: int) -> int:
        """See `torch.distributed.Store`."""
        self._count("add")
        return self.store.add(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `torch.distributed.Store`."""
        self._count("wait")
        self.store.wait(list(keys)) if timeout is None else self.store.wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """See `torch.distributed.Store`."""
        self._count("check")
        return self.store.check(list(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `torch.distributed.Store`."""
        self._count("compare_set")
        return self.store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """See `torch.distributed.Store`."""
        self._count("delete_key")
        return self.store.delete_key(key)

    def append(self, key: str, value: str) -> None:
        """See `torch.distributed.Store`."""
        self._count("append")
        self.store.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `torch.distributed.Store`."""
        self._count("multi_get")
        return self.store.multi_get(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """See `torch.distributed.Store`."""
        self._count("multi_set")
        self.store.multi_set(list(keys), list(values))

    def has_extended_api(self) -> bool:
        """See `torch.distributed.Store`."""
        return self.store.has_extended_api()
