"""Eager connection of collective groups. See `weft.comm.eager_connect`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.primitives import PRIMITIVES
from weft.comm.eager_connect import on_host


def connect_groups(groups: Iterable[tuple[dist.ProcessGroup, Collection[Primitive]]], device: torch.device) -> None:
    """Run each primitive once over its group; all members call this with the groups in the same order.

    Args:
        groups: each with the primitives that it will be used for. An all-to-all connects every pair,
            which takes memory, so name `Primitive.all_to_all` and `Primitive.reduces` for small groups only.
    """
    for group, primitives in groups:
        size = dist.get_world_size(group)
        if size > 1 and not on_host(group):
            for primitive in primitives:
                PRIMITIVES[primitive](torch.zeros(size, 1, device=device), group)
