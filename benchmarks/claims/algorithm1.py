"""Algorithm 1 of Atlas (section 4.5): the time of a step for every number of DP-cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

GetLatencyPp = Callable[[Mapping[str, int], int], float]
GetLatencyDp = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class CellCount:
    """The result of the algorithm with one number of DP-cells.

    Attributes:
        cells: number of DP-cells, the D of the algorithm.
        partitions: pipeline ranks by data centre, without data centres that have none.
        total_time: seconds of a step; infinite if there are too few GPUs.
        throughput: steps per second of one pipeline, times the number of pipelines.
    """

    cells: int
    partitions: Mapping[str, int]
    total_time: float
    throughput: float


def algorithm1(
    d_max: int,
    dcs: Sequence[str],
    num_gpu: Mapping[str, int],
    c: int,
    p: int,
    *,
    get_latency_pp: GetLatencyPp,
    get_latency_dp: GetLatencyDp,
) -> list[CellCount]:
    """Run the paper's algorithm; its inputs have the names of table 2.

    Line 7 of the paper reads ``part_left -= part_assigned`` although the assignment is meant to continue.
    `weft.pipeline.planner.search` goes beyond it: other cell sizes, mixed GPUs, uneven links, and
    a searched order of data centres.

    Args:
        d_max: maximum number of DP-cells.
        dcs: data centres in the order in which they are filled.
        num_gpu: GPUs by data centre.
        c: pipelines of a DP-cell, the ratio of communication to compute.
        p: partitions, the pipeline ranks.
    """
    found = []
    for d in range(1, d_max + 1):  # line 1
        part_left = p  # line 2
        partitions: dict[str, int] = {}
        for dc in dcs:  # line 3
            pp_gpu = num_gpu[dc] // (d * c)  # line 4
            part_assigned = min(part_left, pp_gpu)  # line 5
            if part_assigned:
                partitions[dc] = part_assigned  # line 6
            part_left -= part_assigned  # line 7
            if part_left == 0:  # lines 8 and 9
                break
        if part_left > 0:  # lines 11 and 12
            total_time = float("inf")
        else:
            pp_time = get_latency_pp(partitions, d)  # line 14
            all_reduce_time = get_latency_dp(d * c)  # line 15
            total_time = pp_time + all_reduce_time  # line 17
        found.append(CellCount(cells=d, partitions=partitions, total_time=total_time, throughput=d * c / total_time))
    return found
