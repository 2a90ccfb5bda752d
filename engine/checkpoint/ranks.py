"""The ranks that write or read together, and raise the same error. Ranks that share a file system are a store."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from weft.comm.agreement import Gather, attempt
from weft.engine.checkpoint import durable
from weft.engine.checkpoint.durable import BY_NAME, CheckpointError, explain
from weft.engine.checkpoint.folder import TEMPORARY

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A group of ranks, by default a single one.

    Attributes:
        gather: returns every rank's value, in order of rank. Collective call.
    """

    rank: int = 0
    gather: Gather = lambda value: [value]

    def together(self, folder: Path, action: Callable[[], T]) -> T:
        """Return the result of ``action``, which runs on every rank. Collective call.

        Raises:
            CheckpointError: on every rank, the first failing rank's error.
        """
        return self._attempt(folder, action, share=False)[0]

    def collect(self, folder: Path, action: Callable[[], T]) -> list[T]:
        """Return the results of ``action`` on all ranks, in order of rank. Errors as in `together`."""
        return self._attempt(folder, action, share=True)

    def _attempt(self, folder: Path, action: Callable[[], T], *, share: bool) -> list[T]:
        def explained() -> T:
            try:
                return action()
            except CheckpointError:
                raise
            except Exception as error:  # including defects, so that the other ranks do not wait for this one
                raise explain(folder, error) from error

        outcome = attempt(explained, self.gather, share=share)
        if outcome.failure is not None:
            shared = BY_NAME.get(outcome.failure.kind, CheckpointError)
            raise shared(outcome.failure.text) from outcome.failure.cause
        return outcome.results


LEADERS = 4
"""Number of rounds of `find_stores` for stores of many ranks."""


@dataclass(frozen=True)
class Store:
    """Ranks that share a file system.

    Attributes:
        members: their ranks, ascending.
    """

    members: tuple[int, ...]

    @property
    def leader(self) -> int:
        """Rank that creates, renames and removes folders for the others."""
        return self.members[0]


def find_stores(folder: Path, ranks: Ranks, *, leaders: int = LEADERS) -> tuple[Store, ...]:
    """Return the sets of ranks that share ``folder``, and create it if it is missing. Collective call.

    A rank makes an empty subfolder, and the ranks that see it share its store. The subfolder is removed afterwards.

    Args:
        leaders: rounds in which a single rank makes a subfolder, which suits large stores. Then each remaining rank
            makes one in the same round, which suits many small stores, such as hosts' own disks.

    Raises:
        CheckpointError: the folder is not writable.
    """
    stores: list[Store] = []
    waiting: list[int] | None = None
    while waiting is None or waiting:
        alone = len(stores) < leaders
        first = 0 if waiting is None else waiting[0]
        probing = ranks.rank == first if alone else waiting is None or ranks.rank in waiting
        probe = folder / f"step-probe-{secrets.token_hex(8)}{TEMPORARY}"  # the name is unique
        try:
            probes = ranks.collect(folder, partial(_make, probe) if probing else _nothing)
            if waiting is None:
                waiting = list(range(len(probes)))
            makers = [first] if alone else waiting
            sees = next((maker for maker in makers if maker == ranks.rank or (folder / probes[maker]).exists()), None)
            seen = ranks.gather(sees if ranks.rank in waiting else None)
        finally:
            if probing:
                durable.remove(probe)
        for maker in makers:
            if members := tuple(rank for rank, store in enumerate(seen) if store == maker):
                stores.append(Store(members))
        waiting = [rank for rank in waiting if seen[rank] is None]
    return tuple(stores)


def _make(probe: Path) -> str:
    durable.make_folder(probe)
    return probe.name


def _nothing() -> str:
    """Return no name, in a round in which another rank makes the subfolder."""
    return ""


def store_of(stores: tuple[Store, ...], rank: int) -> Store:
    """Return the store of a rank."""
    return next(store for store in stores if rank in store.members)
