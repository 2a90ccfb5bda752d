"""Timed steps: the loop that is the same for every engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter

import torch.distributed as dist

from benchmarks.peers.case import EngineCase


def time_steps(case: EngineCase, step: Callable[[], object]) -> tuple[float, ...]:
    """Return the seconds of each measured step: between barriers, or between the ends of consecutive steps."""
    if case.in_a_row:
        return _in_a_row(case, step)
    seconds = []
    for _ in range(case.num_warmup + case.num_steps):
        dist.barrier()
        start = perf_counter()
        step()
        dist.barrier()
        seconds.append(perf_counter() - start)
    return tuple(seconds[case.num_warmup :])


def _in_a_row(case: EngineCase, step: Callable[[], object]) -> tuple[float, ...]:
    dist.barrier()
    ends = [perf_counter()]
    for _ in range(case.num_warmup + case.num_steps):
        step()
        ends.append(perf_counter())
    return tuple(after - before for before, after in pairwise(ends))[case.num_warmup :]
