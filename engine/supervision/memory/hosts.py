"""The hosts of a job: ranks that share memory, and partners for copies of memory checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.checkpoint.ranks import Store


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host and their partners.

    Attributes:
        stores: the ranks of each host.
        keepers: for each rank its partner, which stores its copy on another host, or None if there is only one host.
    """

    stores: tuple[Store, ...]
    keepers: tuple[int | None, ...]

    @classmethod
    def of(cls, stores: tuple[Store, ...], sites: Sequence[int]) -> Hosts:
        """Assign partners. ``sites`` contains the site of each rank."""
        numbers = [next(number for number, each in enumerate(stores) if rank in each.members) for rank in _all(stores)]
        return cls(stores, partners(numbers, sites))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The rank of each host that manages its memory checkpoints."""
        return tuple(store.leader for store in self.stores)

    def guests(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose copies ``rank`` stores."""
        return tuple(guest for guest, keeper in enumerate(self.keepers) if keeper == rank)

    def kept_by(self, store: Store) -> list[int]:
        """Return the ranks whose memory checkpoints a host stores: its own, and those with partners on it."""
        return [rank for member in store.members for rank in (member, *self.guests(member))]


def _all(stores: Sequence[Store]) -> list[int]:
    return sorted(rank for store in stores for rank in store.members)


def partners(hosts: Sequence[int], sites: Sequence[int]) -> tuple[int | None, ...]:
    """Return the partner of each rank, or None if all ranks are on one host.

    Each host stores the copies of one other host, so that any single host may be lost. Partners are at the same site
    if possible, because links between sites are needed for training.

    Args:
        hosts: the host of each rank.
        sites: the site of each rank. Ranks of one host may belong to several sites.
    """
    members = {host: [rank for rank, of_rank in enumerate(hosts) if of_rank == host] for host in sorted(set(hosts))}
    site_of = {host: sites[ranks[0]] for host, ranks in members.items()}
    keepers = {host: _next(host, site_of) for host in members}
    kept: list[int | None] = []
    for rank, host in enumerate(hosts):
        keeper = keepers[host]
        kept.append(None if keeper is None else members[keeper][members[host].index(rank) % len(members[keeper])])
    return tuple(kept)


def _next(host: int, site_of: dict[int, int]) -> int | None:
    """Return the next host in a ring of the site's hosts, or of all hosts if the site has no other, or None."""
    near = [other for other, site in site_of.items() if site == site_of[host]]
    ring = near if len(near) > 1 else list(site_of)
    after = ring[(ring.index(host) + 1) % len(ring)]
    return None if after == host else after
