"""Stores: groups of ranks that share a file system; sites need not share one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weft.engine.checkpoint import durable
from weft.engine.checkpoint.folder import TEMPORARY
from weft.engine.checkpoint.ranks import Ranks


@dataclass(frozen=True)
class Store:
    """Ranks that share a file system.

    Attributes:
        members: their ranks, ascending.
    """

    members: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that creates, renames and removes folders for the others."""
        return self.members[0]


def find_stores(folder: Path, ranks: Ranks) -> tuple[Store, ...]:
    """Find out which ranks share ``folder``, creating it if missing; a collective call.

    Raises:
        CheckpointError: the folder is not writable.
    """
    stores: list[Store] = []
    waiting = set(range(len(ranks.gather(None))))
    while waiting:
        # The first rank without a store creates a probe; ranks that see it share its store.
        leader = min(waiting)
        probe = folder / f"step-probe-{ranks.gather(secrets.token_hex(8))[leader]}{TEMPORARY}"
        ranks.together(folder, partial(durable.make_folder, probe) if ranks.rank == leader else _nothing)
        seen = ranks.gather(ranks.rank in waiting and probe.exists())
        if ranks.rank == leader:
            durable.remove(probe)
        stores.append(Store(tuple(rank for rank, sees in enumerate(seen) if sees)))
        waiting -= set(stores[-1].members)
    return tuple(stores)


def _nothing() -> None:
    """No-op of the other ranks."""


def store_of(stores: tuple[Store, ...], rank: int) -> Store:
    """The store of a rank."""
    return next(store for store in stores if rank in store.members)
