"""Object collectives without pickle: gather and broadcast small values over a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.emulated.world import Asked, emulated_world
from weft.comm.values import decode, encode

MOST_BYTES = 1 << 30
"""Maximum size of one rank's value; a larger announced size is an error."""


def gather(
    value: object,
    *,
    group: dist.ProcessGroup | None = None,
    kinds: tuple[type, ...] = (),
    asked: Asked = Asked.value,
) -> list[Any]:
    """All ranks' values, in rank order; a collective call over ``group``.

    `torch.distributed.all_gather_object` does the same with pickle, which would execute code sent by
    an unauthenticated peer.

    Args:
        value: anything that `weft.comm.values.encode` accepts.
        kinds: dataclasses and enums that may occur in values.
        asked: what it is, where ranks that are emulated answer it differently.

    Raises:
        ValueError: a rank sent something else.
    """
    world = emulated_world()
    if world is not None:
        return world.gather(value, dist.get_process_group_ranks(group or dist.group.WORLD), asked)
    mine = _bytes(encode(value), group)
    lengths = _lengths(mine, group)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=mine.device)
    padded[: len(mine)] = mine
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return [
        decode(data[:length].cpu().numpy().tobytes(), kinds) for data, length in zip(received, lengths, strict=True)
    ]


def broadcast(value: object, *, src: int = 0, kinds: tuple[type, ...] = ()) -> Any:
    """Rank ``src``'s value on every rank; a collective call over the world.

    Args:
        value: ignored on ranks other than ``src``.
        kinds: as for `gather`.

    Raises:
        ValueError: rank ``src`` sent something else.
    """
    world = emulated_world()
    if world is not None:
        return world.hear(src, lambda: value, kinds)
    first = dist.get_rank() == src
    data = _bytes(encode(value) if first else b"", None)
    length = torch.tensor([len(data)], device=data.device)
    dist.broadcast(length, src=src)
    if not first:
        data = torch.empty(_checked(int(length)), dtype=torch.uint8, device=data.device)
    dist.broadcast(data, src=src)
    return value if first else decode(data.cpu().numpy().tobytes(), kinds)


def _bytes(data: bytes, group: dist.ProcessGroup | None) -> Tensor:
    """A byte tensor on the device that ``group`` communicates from."""
    device = dist.distributed_c10d._get_object_coll_device(group)  # torch's own answer; 2.11 to 2.13
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        if data
        else torch.empty(0, dtype=torch.uint8, device=device)
    )


def _lengths(mine: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    length = torch.tensor([len(mine)], device=mine.device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    return [_checked(int(length)) for length in lengths]


def _checked(length: int) -> int:
    if not 0 < length <= MOST_BYTES:
        raise ValueError(f"a rank announced a value of {length} bytes; the maximum is {MOST_BYTES}")
    return length
