"""The first contact of groups; see `weft.comm.first_contact` for why there is one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.primitives import PRIMITIVES
from weft.comm.first_contact import on_host


def meet_all(groups: Iterable[tuple[dist.ProcessGroup, Collection[Primitive]]], device: torch.device) -> None:
    """Run primitives once over their groups; all members come to them in the same order.

    Args:
        groups: each with what it will be used for. An exchange of all with all connects every pair,
            at the cost of memory, so name `Primitive.reduces` for small groups only.
    """
    for group, primitives in groups:
        size = dist.get_world_size(group)
        if size > 1 and not on_host(group):
            for primitive in primitives:
                PRIMITIVES[primitive](torch.zeros(size, 1, device=device), group)
