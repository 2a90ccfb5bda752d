"""The partners that store copies of each other's memory checkpoints, and the transfers between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.checkpoint.ranks import Store
from weft.engine.supervision.memory.slots import Slot


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


Transfer = tuple[int, int]
"""Source rank and destination rank."""


def send_copy(group: dist.ProcessGroup, slot: Slot | None, text: bytes, partner: int | None) -> list[dist.Work]:
    """Start to send a slot with its commit ``text`` to the partner, if any. Without ``text``, send sizes of zero.

    Returns:
        The operations to wait for. The slot must not change until they are complete.
    """
    if partner is None:
        return []
    parts = [torch.zeros(2, dtype=torch.int64)]
    if slot is not None and text:
        parts = [torch.tensor([len(text), slot.bytes.numel()]), _bytes(text), slot.bytes]
    return [_started(dist.isend(part, partner, group=group)) for part in parts]


def receive_copies(
    group: dist.ProcessGroup, guests: Sequence[int], slot_of: Callable[[int], Slot]
) -> list[tuple[int, Exception]]:
    """Receive the slots of ``guests``, and commit them on this host.

    Returns:
        The ranks in ``guests`` whose slots could not be stored, each with the error.
    """
    failed: list[tuple[int, Exception]] = []
    for guest in guests:
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, guest, group=group)
        if not int(sizes[0]):
            continue
        text = torch.empty(int(sizes[0]), dtype=torch.uint8)
        slot = None
        try:
            slot = slot_of(guest)
            slot.open(int(sizes[1]))
            target = slot.bytes
        except (OSError, ValueError) as error:
            failed.append((guest, error))
            slot, target = None, torch.empty(int(sizes[1]), dtype=torch.uint8)  # the peer sends anyway
        dist.recv(text, guest, group=group)
        dist.recv(target, guest, group=group)
        if slot is not None:
            try:
                slot.commit(text.numpy().tobytes())
            except OSError as error:
                failed.append((guest, error))
    return failed


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "every rank is a member of the group"
    return work


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
