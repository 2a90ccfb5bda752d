"""Connections made before anything depends on them, by all ranks in one order.

NCCL connects ranks inside the first operation that needs it, and that call returns to the host
when the others have come to the same one. Two ranks that each post a receive first would wait
for each other for ever, so whoever opens a group makes its first contact here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

Hop = tuple[int, int]
"""Sender and receiver, as global ranks."""


def on_host(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group's tensors are in host memory: gloo, which connects when a group is made."""
    return dist.get_backend(group) == "gloo"


def meet_pairs(hops: Sequence[tuple[Hop, dist.ProcessGroup]], device: torch.device) -> None:
    """Send one element over every hop of this rank.

    Args:
        hops: each with its group, in an order that all ranks share, as `in_turn` gives it.
    """
    me = dist.get_rank()
    for (sender, receiver), group in hops:
        element = torch.zeros(1, device=device)
        if me == sender:
            dist.send(element, receiver, group=group)
        elif me == receiver:
            dist.recv(element, sender, group=group)


def turns(hops: Iterable[Hop]) -> dict[Hop, int]:
    """A number for each hop, counted from 0: hops of one number have no rank in common, the same on every rank."""
    numbers: dict[Hop, int] = {}
    taken: dict[int, set[int]] = {}
    for hop in sorted(set(hops), key=lambda hop: (min(hop), max(hop), hop)):
        busy = taken.setdefault(hop[0], set()) | taken.setdefault(hop[1], set())
        numbers[hop] = next(number for number in range(len(busy) + 1) if number not in busy)
        for rank in hop:
            taken[rank].add(numbers[hop])
    return numbers


def in_turn(hops: Iterable[Hop]) -> list[Hop]:
    """The same hops, so ordered that those without a common rank come to their turn side by side."""
    numbers = turns(hops)
    return sorted(numbers, key=lambda hop: (numbers[hop], hop))
