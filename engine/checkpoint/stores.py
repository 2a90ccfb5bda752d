"""The store: a folder as the ranks of one file system see it; data centres need not share one."""

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
    """Ranks that see the same files.

    Attributes:
        members: ranks, ascending.
    """

    members: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that makes, names and removes folders for all."""
        return self.members[0]


def find_stores(folder: Path, ranks: Ranks) -> tuple[Store, ...]:
    """Which ranks see the same ``folder``, which is made where it is missing; a collective call.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    stores: list[Store] = []
    waiting = set(range(len(ranks.gather(None))))
    while waiting:
        # The first rank that belongs to no store yet shows a file; who sees it shares its store.
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
    """What the ranks do that only meet."""


def store_of(stores: tuple[Store, ...], rank: int) -> Store:
    """The store that a rank belongs to."""
    return next(store for store in stores if rank in store.members)
