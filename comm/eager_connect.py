"""Eager connection of process groups: all ranks connect in one order, before the first step.

NCCL connects lazily, inside the first operation between two ranks, and that call blocks the host
until the peer issues the matching one. Two ranks that both post a receive first would deadlock,
so code that creates a group connects it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from weft.comm.backends import GLOO
from weft.comm.job import current_job
from weft.comm.links import Hop


def on_host(group: dist.ProcessGroup | None = None) -> bool:
    """True if the group communicates from host memory (gloo, which connects when the group is created)."""
    return not current_job().is_real or dist.get_backend(group) in ("gloo", GLOO)


def connect_pairs(hops: Sequence[tuple[Hop, dist.ProcessGroup]], device: torch.device) -> None:
    """Connect every hop of this rank by sending one element over it.

    Args:
        hops: each with its group, in an order that all ranks share, as `in_color_order` gives it.
    """
    me = dist.get_rank()
    for (sender, receiver), group in hops:
        element = torch.zeros(1, device=device)
        if me == sender:
            dist.send(element, receiver, group=group)
        elif me == receiver:
            dist.recv(element, sender, group=group)


def edge_colors(hops: Iterable[Hop]) -> dict[Hop, int]:
    """An edge colouring, the same on every rank: hops of one colour (0, 1, ...) have no rank in common."""
    colors: dict[Hop, int] = {}
    taken: dict[int, set[int]] = {}
    for hop in sorted(set(hops), key=lambda hop: (min(hop), max(hop), hop)):
        busy = taken.setdefault(hop[0], set()) | taken.setdefault(hop[1], set())
        colors[hop] = next(color for color in range(len(busy) + 1) if color not in busy)
        for rank in hop:
            taken[rank].add(colors[hop])
    return colors


def in_color_order(hops: Iterable[Hop]) -> list[Hop]:
    """The hops ordered by colour, so that those without a common rank connect at the same time."""
    colors = edge_colors(hops)
    return sorted(colors, key=lambda hop: (colors[hop], hop))
