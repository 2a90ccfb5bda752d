"""Measure how well compute and collectives overlap on this machine, as DHelix's OEF per pair (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch

from weft.comm.channel import Handle
from weft.conf.host.measurements import spread_of
from weft.engine.parallel.axis import AxisGroup
from weft.pipeline.strands.overlap import OverlapTable, overlap_effectiveness
from weft.pipeline.strands.segments import Kind, LinkScope

BYTES = 1 << 24
"""Sizes of the tensors in a measured collective."""
REPEATS = 5


def measure_overlap(
    groups: Mapping[LinkScope, AxisGroup],
    device: torch.device,
    *,
    num_bytes: int = BYTES,
    repeats: int = REPEATS,
    kernels: Mapping[Kind, Callable[[], object]] | None = None,
) -> OverlapTable:
    """Measure the OEF of every kind of compute with a collective of each link class, and of two collectives.

    Collective call over the groups. All members start the same collectives in the same order. The times of the
    slowest member count.

    Args:
        groups: for each class of links to measure, a group with more than one member.
        repeats: number of timed runs of each combination, after a warm-up run.
        kernels: compute to measure instead of products, attention and copies.
    """
    collectives = {link: _AllGather(group, device, num_bytes) for link, group in groups.items()}
    alone_s = {link: median(_slowest_s([collective], [], device, repeats)) for link, collective in collectives.items()}
    compute, spreads = {}, []
    for kind, kernel in (kernels or usual_kernels(device)).items():
        for link, collective in collectives.items():
            work = _lasting(kernel, alone_s[link], collective, device)
            work_s = median(_slowest_s([], [work], device, repeats, collective))
            both = _slowest_s([collective], [work], device, repeats)
            spreads.append(spread_of(both, median(both)))
            compute[kind, link] = _within(overlap_effectiveness(work_s, alone_s[link], median(both)))
    spread = median(spreads)
    if len(collectives) < 2:
        return OverlapTable(compute, spread=spread)
    both_s = median(_slowest_s([*collectives.values()], [], device, repeats))
    inside_s, between_s = alone_s[LinkScope.inside_host], alone_s[LinkScope.between_hosts]
    return OverlapTable(compute, links=_within(overlap_effectiveness(inside_s, between_s, both_s)), spread=spread)


def usual_kernels(device: torch.device) -> dict[Kind, Callable[[], object]]:
    """Return functions that run a matrix product, attention and a copy, in the device's fast dtype."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    small = torch.ones(256, 256, device=device, dtype=dtype)
    is_fast = device.type == "cuda" and _seconds(lambda: small @ small, device) < 1e-3  # no emulated one
    size = 2048 if is_fast else 256
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    heads = torch.ones(1, 8, size, 64, device=device, dtype=dtype)
    source = torch.ones(size * size * 4, device=device)
    target = torch.empty_like(source)
    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        Kind.gemm: lambda: matrix @ matrix,
        Kind.attention: lambda: attention(heads, heads, heads, is_causal=True),
        Kind.memory: lambda: target.copy_(source),
    }


class _AllGather:
    """An all-gather that can be started repeatedly on the same buffers."""

    def __init__(self, group: AxisGroup, device: torch.device, num_bytes: int) -> None:
        self.group = group
        self._shard = torch.zeros(num_bytes // 4 // group.size, device=device)

    def start(self) -> Handle:
        return self.group.all_gather(self._shard)

    def slowest(self, seconds: float) -> float:
        """Return the longest of the members' times. This is also a barrier."""
        return float(self.group.maximum(torch.tensor([seconds], device=self._shard.device)).wait())


def _slowest_s(
    collectives: list[_AllGather],
    work: list[Callable[[], None]],
    device: torch.device,
    repeats: int,
    among: _AllGather | None = None,
) -> list[float]:
    """Time collectives and work that start together. Return the seconds of the slowest member for each repeat.

    Args:
        among: the group to synchronise if no collective is measured.
    """
    asked = among or collectives[0]
    found = []
    for number in range(repeats + 1):
        asked.slowest(0.0)
        _finish(device)
        start = perf_counter()
        handles = [collective.start() for collective in collectives]
        for run in work:
            run()
        for handle in handles:
            handle.wait()
        _finish(device)
        seconds = asked.slowest(perf_counter() - start)
        if number:
            found.append(seconds)
    return found


def _lasting(
    kernel: Callable[[], object], seconds: float, among: _AllGather, device: torch.device
) -> Callable[[], None]:
    """Return a function that repeats the kernel for about ``seconds``, equally often on all members."""
    times = max(1, round(seconds / among.slowest(_seconds(kernel, device))))

    def run() -> None:
        for _ in range(times):
            kernel()

    return run


def _seconds(kernel: Callable[[], object], device: torch.device) -> float:
    """Return the average time of three runs of ``kernel``, after a warm-up run."""
    kernel()
    _finish(device)
    start = perf_counter()
    for _ in range(3):
        kernel()
    _finish(device)
    return (perf_counter() - start) / 3


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _within(factor: float) -> float:
    return min(1.0, max(0.0, factor))
