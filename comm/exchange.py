"""Small values told to other ranks over a process group, on any device, and never as pickles."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.values import decode, encode

MOST_BYTES = 1 << 30
"""Of one rank's value: what claims to be longer comes from no rank of ours."""


def gather(value: object, *, group: dist.ProcessGroup | None = None, kinds: tuple[type, ...] = ()) -> list[Any]:
    """Every rank's value, in order of rank; a collective call over ``group``.

    `torch.distributed.all_gather_object` does the same with pickles, which run what an unauthenticated peer
    in the place of a rank writes into them.

    Args:
        value: as `weft.comm.values.encode` takes it.
        kinds: dataclasses and enums that values are made of.

    Raises:
        ValueError: a rank said something else.
    """
    mine = _bytes(encode(value), group)
    lengths = _lengths(mine, group)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=mine.device)
    padded[: len(mine)] = mine
    everyones = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyones, padded, group=group)
    return [
        decode(said[:length].cpu().numpy().tobytes(), kinds) for said, length in zip(everyones, lengths, strict=True)
    ]


def broadcast(value: object, *, src: int = 0, kinds: tuple[type, ...] = ()) -> Any:
    """The value of rank ``src``, on every rank; a collective call over the whole world.

    Args:
        value: of other ranks than ``src`` is not looked at.
        kinds: as of `gather`.

    Raises:
        ValueError: rank ``src`` said something else.
    """
    first = dist.get_rank() == src
    said = _bytes(encode(value) if first else b"", None)
    length = torch.tensor([len(said)], device=said.device)
    dist.broadcast(length, src=src)
    if not first:
        said = torch.empty(_checked(int(length)), dtype=torch.uint8, device=said.device)
    dist.broadcast(said, src=src)
    return value if first else decode(said.cpu().numpy().tobytes(), kinds)


def _bytes(data: bytes, group: dist.ProcessGroup | None) -> Tensor:
    """A tensor on the device that ``group`` takes."""
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
        raise ValueError(f"a rank announced a value of {length} bytes; the most is {MOST_BYTES}")
    return length
