"""Measure the link between two ranks of this machine."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import TensorSpec
from weft.comm.shared_channel import share
from weft.comm.torch_channel import between_hosts, connect
from weft.engine.distributed import init_distributed
from weft.pipeline.costs import LinkCost
from weft.tools.ranks import run_ranks

ROUND_TRIPS = 40
TIMEOUT_S = 120.0

Send = Callable[[Tensor], Any]
Receive = Callable[[TensorSpec], Any]
"""Start a transfer, and return a handle with `wait`."""
_HERE = partial(run_ranks, 2)


class Way(Enum):
    """The transport of messages between ranks."""

    shared = "shared memory"
    """Weft's channel inside of a host."""
    network = "network"
    """Weft's channel over gloo, inside of a site."""
    gloo = "gloo"
    """gloo alone, as in the other engines."""


def measure_link(num_bytes: int, way: Way, *, run: Callable[..., list] = _HERE, idle_s: float = 0.0) -> LinkCost:
    """Measure the latency of a small message, and the bandwidth of ``num_bytes``.

    Args:
        run: starts the two ranks, as `run_ranks` does.
        idle_s: seconds without work before each message, because a processor that has slept is slower. Ranks compute
            between two messages.
    """
    (small_s, large_s), _ = run(_round_trips, num_bytes, way, idle_s, timeout_s=TIMEOUT_S)
    rest_s = max(large_s - small_s, 0.1 * large_s)  # where noise hides the difference
    return LinkCost(latency_s=small_s, bandwidth_bps=8 * num_bytes / rest_s)


def _round_trips(num_bytes: int, way: Way, idle_s: float) -> tuple[float, float]:
    device = init_distributed(TIMEOUT_S)
    me, other = dist.get_rank(), 1 - dist.get_rank()
    hops = {(0, 1), (1, 0)}
    ends: dict[tuple[int, int], Any] = {}
    if way is Way.shared:
        ends = share(hops, timeout_s=TIMEOUT_S)[0]
    elif way is Way.network:
        ends = connect(hops, device=device, timeout_s=TIMEOUT_S, rts_group=between_hosts())

    on = torch.device("cpu") if way is Way.shared and ends else device

    def send(tensor: Tensor) -> Any:
        return ends[me, other].send("t", tensor) if ends else dist.isend(tensor, other)

    def receive(spec: TensorSpec) -> Any:
        if ends:
            return ends[other, me].recv("t", spec)
        return dist.irecv(torch.empty(spec.shape, dtype=spec.dtype, device=device), other)

    # NCCL carries out what two ranks send each other in the order of its calls.
    ahead = bool(ends) or device.type == "cpu"
    small_s, large_s = (_one_way_s(send, receive, size, idle_s, on=on, ahead=ahead) for size in (4, num_bytes))
    dist.barrier()
    for end in ends.values():
        end.close()
    return small_s, large_s


def _one_way_s(send: Send, receive: Receive, num_bytes: int, idle_s: float, *, on: torch.device, ahead: bool) -> float:
    """Return half of the median round trip.

    Args:
        ahead: whether both receives are posted first.
    """
    me = dist.get_rank()
    tensor = torch.zeros(num_bytes // 4, device=on)
    spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
    seconds = []
    for _ in range(ROUND_TRIPS):
        coming = receive(spec) if ahead else None
        dist.barrier()
        sleep(idle_s)
        start = perf_counter()
        if me == 1:
            (coming or receive(spec)).wait()
        send(tensor).wait()
        if me == 0:
            (coming or receive(spec)).wait()
        if on.type == "cuda":
            torch.cuda.synchronize(on)  # only the stream has waited
        seconds.append((perf_counter() - start) / 2)
    return median(seconds)
