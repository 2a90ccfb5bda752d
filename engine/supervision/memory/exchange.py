"""Transfers of slots between hosts: to a rank's partner after a copy, and to hosts that lack them at a restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.supervision.memory.slot import Slot

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
