"""Primitives on torch.distributed along one axis of a mesh, and measurements of their durations.

Each takes a contiguous tensor and a process group of n ranks. Reducing primitives map [n, ...] to
[...], gathering primitives map [...] to [n, ...]; all_reduce works in place.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.backends import on_host
from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.costs import Sample
from weft.comm.collectives.group import LinkClass

# torch 2.13 renamed these two and deprecates the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the tensors of all ranks in place."""
    _wait(dist.all_reduce(tensor, group=group, async_op=True))
    return tensor


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's row of the sum."""
    shard = tensor.new_empty(tensor.shape[1:])
    _wait(_reduce_scatter(shard.view(-1), tensor.view(-1), group=group, async_op=True))
    return shard


def reduces(tensor: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> Tensor:
    """Return this rank's row of the sum, by one reduce per root, in ``dtype``. None: the dtype of ``tensor``.

    The reduces run as one all-to-all; each root adds in rank order.
    """
    received = torch.empty_like(tensor)
    _wait(dist.all_to_all_single(received.view(-1), tensor.view(-1), group=group, async_op=True))
    return received.sum(0, dtype=dtype or tensor.dtype)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' tensors, stacked."""
    whole = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    _wait(_all_gather(whole.view(-1), tensor.view(-1), group=group, async_op=True))
    return whole


def broadcasts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' tensors, stacked, by one broadcast per root."""
    whole = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    whole[dist.get_rank(group)] = tensor
    works = [dist.broadcast(row.view(-1), group=group, group_src=root, async_op=True) for root, row in enumerate(whole)]
    for work in works:
        _wait(work)
    return whole


def maximum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replace each element by the maximum over all ranks."""
    _wait(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True))
    return tensor


def shift(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send this rank's tensor to the next rank (the last rank's to the first), and return the previous rank's.

    The send and the receive are one collective call, so they cannot deadlock.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = tensor.shape[0]
    send, receive = ([rows if member == (rank + way) % size else 0 for member in range(size)] for way in (1, -1))
    return all_to_all(tensor, group, send=send, receive=receive)


def all_to_all(
    tensor: Tensor, group: dist.ProcessGroup, *, send: Sequence[int] = (), receive: Sequence[int] = ()
) -> Tensor:
    """Send ``send[r]`` rows of [sum(send), ...] to each rank r. Return the received rows, [sum(receive), ...].

    Without ``send`` and ``receive`` every rank gets the same number of rows: [n, ...] to [n, ...].
    """
    received = tensor.new_empty((sum(receive), *tensor.shape[1:])) if receive else torch.empty_like(tensor)
    _wait(dist.all_to_all_single(received, tensor, list(receive), list(send), group=group, async_op=True))
    return received


PRIMITIVES: Mapping[Primitive, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    Primitive.all_reduce: all_reduce,
    Primitive.reduce_scatter: reduce_scatter,
    Primitive.reduces: reduces,
    Primitive.all_gather: all_gather,
    Primitive.broadcasts: broadcasts,
    Primitive.shift: shift,
    Primitive.all_to_all: all_to_all,
}
"""The implementation of each primitive that ranks carry out."""


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is a member of the group"
    work.wait()


def connect_groups(groups: Iterable[tuple[dist.ProcessGroup, Collection[Primitive]]], device: torch.device) -> None:
    """Run each primitive once over its group; all members call this with the groups in the same order.

    Args:
        groups: each process group, with the primitives that will run on it. An all-to-all connects every pair,
            which takes memory, so name `Primitive.all_to_all` and `Primitive.reduces` for small groups only.
    """
    for group, primitives in groups:
        size = dist.get_world_size(group)
        if size > 1 and not on_host(group):
            for primitive in primitives:
                PRIMITIVES[primitive](torch.zeros(size, 1, device=device), group)


KEPT = 8
"""Durations to keep of each primitive, link and size."""

Kind = tuple[LinkClass, Primitive, int, int]
"""Fields of a `Sample` but for the seconds."""


class Times:
    """Timestamps before and after the latest primitives. On a GPU they are CUDA events, read by `samples`."""

    def __init__(self) -> None:
        self._marks: dict[Kind, deque[tuple[Any, Any]]] = defaultdict(partial(deque, maxlen=KEPT))

    @contextmanager
    def of(self, kind: Kind, tensor: Tensor) -> Iterator[None]:
        """Record the beginning and the end of a primitive on the device of ``tensor``."""
        begin = _mark(tensor)
        yield
        self._marks[kind].append((begin, _mark(tensor)))

    def samples(self) -> list[Sample]:
        """Return the shortest duration of each kind. Longer ones include waits for late ranks."""
        return [Sample(*kind, min(_seconds(begin, end) for begin, end in marks)) for kind, marks in self._marks.items()]


def _mark(tensor: Tensor) -> Any:
    if not tensor.is_cuda:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
