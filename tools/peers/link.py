"""The link between two ranks of this machine, as a cost."""

from __future__ import annotations

from datetime import timedelta
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from weft.pipeline.costs import LinkCost
from weft.tools.ranks import run_ranks

ROUND_TRIPS = 40
TIMEOUT_S = 120.0


def measure_link(num_bytes: int) -> LinkCost:
    """Latency of a small message over gloo, and the bandwidth at which ``num_bytes`` follow."""
    (small_s, large_s), _ = run_ranks(2, _round_trips, num_bytes, timeout_s=TIMEOUT_S)
    return LinkCost(latency_s=small_s, bandwidth_bps=8 * num_bytes / max(large_s - small_s, 1e-9))


def _round_trips(num_bytes: int) -> tuple[float, float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    return _one_way_s(4), _one_way_s(num_bytes)


def _one_way_s(num_bytes: int) -> float:
    """Median of half a round trip with both receives posted first."""
    me = dist.get_rank()
    here, there = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    seconds = []
    for _ in range(ROUND_TRIPS):
        receive = dist.irecv(there, 1 - me)
        dist.barrier()
        start = perf_counter()
        if me == 1:
            receive.wait()
        dist.isend(here, 1 - me).wait()
        if me == 0:
            receive.wait()
        seconds.append((perf_counter() - start) / 2)
    return median(seconds)
