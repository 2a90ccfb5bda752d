"""Object collectives without pickle: gather and broadcast small values over a process group."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.job import GatherPurpose, current_job
from weft.comm.values import decode, encode

MOST_BYTES = 1 << 30
"""Maximum size of one rank's value; a larger announced size is an error."""
_LENGTH = struct.Struct("<q")
_FIRST_BYTES = 504
"""Bytes of a value that are sent with its length, because a second exchange between sites takes as long again."""


def gather(
    value: object,
    *,
    group: dist.ProcessGroup | None = None,
    kinds: tuple[type, ...] = (),
    purpose: GatherPurpose = GatherPurpose.value,
) -> list[Any]:
    """Return all ranks' values, in rank order. A collective call over ``group``.

    `torch.distributed.all_gather_object` does the same with pickle, which would execute code sent by
    an unauthenticated peer.

    Args:
        value: anything that `weft.comm.values.encode` accepts.
        kinds: dataclasses and enums that may occur in values.
        purpose: the kind of value, so that emulated ranks can answer with values of their own.

    Raises:
        ValueError: a rank sent a value of another type, or one that is too long.
    """
    real = partial(_gather, value, group, kinds)
    return current_job().gather(real, value, group or dist.group.WORLD, purpose)


def _gather(value: object, group: dist.ProcessGroup | None, kinds: tuple[type, ...]) -> list[Any]:
    data, device = encode(value), _device(group)
    messages = _all_gathered(_first(data), device, group)
    lengths = [_length(first) for first in messages]
    if max(lengths) > _FIRST_BYTES:
        rest = torch.zeros(max(lengths) - _FIRST_BYTES, dtype=torch.uint8)
        rest[: max(0, len(data) - _FIRST_BYTES)] = _tensor(data[_FIRST_BYTES:])
        messages = torch.cat((messages, _all_gathered(rest, device, group)), dim=1)
    return [_decoded(each, length, kinds) for each, length in zip(messages, lengths, strict=True)]


def broadcast(value: object, *, src: int = 0, kinds: tuple[type, ...] = ()) -> Any:
    """Return rank ``src``'s value on every rank. A collective call over the world.

    Args:
        value: ignored on ranks other than ``src``.

    Raises:
        ValueError: rank ``src`` sent a value of another type, or one that is too long.
    """
    return current_job().broadcast(partial(_broadcast, value, src, kinds), value, src, kinds)


def _broadcast(value: object, src: int, kinds: tuple[type, ...]) -> Any:
    is_source, device = dist.get_rank() == src, _device(None)
    data = encode(value) if is_source else b""
    first = _first(data).to(device)
    dist.broadcast(first, src=src)
    message = first.cpu()
    if (length := _length(message)) > _FIRST_BYTES:
        rest = _tensor(data[_FIRST_BYTES:]) if is_source else torch.empty(length - _FIRST_BYTES, dtype=torch.uint8)
        rest = rest.to(device)
        dist.broadcast(rest, src=src)
        message = torch.cat((message, rest.cpu()))
    return value if is_source else _decoded(message, length, kinds)


def _all_gathered(mine: Tensor, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather ``mine``, of equal size on all ranks, to host memory: [ranks, bytes]."""
    gathered = torch.empty(dist.get_world_size(group), len(mine), dtype=torch.uint8, device=device)
    dist.all_gather(list(gathered), mine.to(device), group=group)
    return gathered.cpu()


def _first(data: bytes) -> Tensor:
    """Pack the length and the first bytes of ``data``, usually all, uint8 of the same size on all ranks."""
    return _tensor(_LENGTH.pack(len(data)) + data[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"))


def _length(first: Tensor) -> int:
    """Return the length of a rank's value from its first message, and check it against `MOST_BYTES`."""
    (length,) = _LENGTH.unpack_from(first.numpy().tobytes())
    if not 0 < length <= MOST_BYTES:
        raise ValueError(f"a rank announced a value of {length} bytes; the maximum is {MOST_BYTES}")
    return length


def _decoded(message: Tensor, length: int, kinds: tuple[type, ...]) -> Any:
    return decode(message[_LENGTH.size :][:length].numpy().tobytes(), kinds)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device whose memory the collectives of ``group`` use."""
    return dist.distributed_c10d._get_object_coll_device(group)  # private; in torch 2.11 to 2.13
