"""The hosts of a job, as memory checkpoints see them: who shares memory, and who keeps whose copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.checkpoint.memory.partners import partners
from weft.engine.checkpoint.stores import Store


@dataclass(frozen=True)
class Hosts:
    """Where the ranks of a job are.

    Attributes:
        stores: the ranks of each host.
        keepers: for each rank the one on another host that keeps its copy; None on a single host.
    """

    stores: tuple[Store, ...]
    keepers: tuple[int | None, ...]

    @classmethod
    def of(cls, stores: tuple[Store, ...], sites: Sequence[int]) -> Hosts:
        """Hosts with their partners; ``sites`` is that of each rank."""
        numbers = [next(number for number, each in enumerate(stores) if rank in each.members) for rank in _all(stores)]
        return cls(stores, partners(numbers, sites))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The rank of each host that looks after its memory."""
        return tuple(store.leader for store in self.stores)

    def guests(self, rank: int) -> tuple[int, ...]:
        """The ranks whose copies ``rank`` keeps."""
        return tuple(guest for guest, keeper in enumerate(self.keepers) if keeper == rank)

    def kept_by(self, store: Store) -> list[int]:
        """The ranks whose memory checkpoints a host holds: its own, and its guests."""
        return [rank for member in store.members for rank in (member, *self.guests(member))]


def _all(stores: Sequence[Store]) -> list[int]:
    return sorted(rank for store in stores for rank in store.members)
