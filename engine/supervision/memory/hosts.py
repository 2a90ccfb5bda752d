"""The hosts of a job: ranks that share memory, and partners for copies of memory checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.checkpoint.ranks import Store
from weft.engine.supervision.memory.partners import partners


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host and their partners.

    Attributes:
        stores: the ranks of each host.
        keepers: for each rank its partner, which stores its copy on another host, or None on a single host.
    """

    stores: tuple[Store, ...]
    keepers: tuple[int | None, ...]

    @classmethod
    def of(cls, stores: tuple[Store, ...], sites: Sequence[int]) -> Hosts:
        """Assign partners. ``sites`` has the site of each rank."""
        numbers = [next(number for number, each in enumerate(stores) if rank in each.members) for rank in _all(stores)]
        return cls(stores, partners(numbers, sites))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the rank of each host that manages its memory checkpoints."""
        return tuple(store.leader for store in self.stores)

    def guests(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose copies ``rank`` stores."""
        return tuple(guest for guest, keeper in enumerate(self.keepers) if keeper == rank)

    def kept_by(self, store: Store) -> list[int]:
        """Return the ranks whose memory checkpoints a host stores: its own, and those of partners."""
        return [rank for member in store.members for rank in (member, *self.guests(member))]


def _all(stores: Sequence[Store]) -> list[int]:
    return sorted(rank for store in stores for rank in store.members)
