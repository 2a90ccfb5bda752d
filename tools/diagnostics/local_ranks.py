"""Collectives between the devices of this host, or between processes where there are none."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from weft.engine.supervision.finding import Finding, Verdict
from weft.tools.diagnostics.exchange import Exchanged, all_reduce, all_to_all
from weft.tools.diagnostics.judging import Judge
from weft.tools.local_ranks import answers_of

OWN_SHARE = 0.3
"""Least share of the best rate of this host."""
MOST_S = 15.0
"""Seconds from when all ranks are there, after which one that has not answered is named."""


def check_local_collectives(ranks: int, judge: Judge, *, damaged: int = -1, hung: int = -1) -> Finding:
    """Bytes per second and rank of an all-to-all and an all-reduce among ``ranks`` processes.

    Args:
        ranks: of this host; with GPUs, one each.
        damaged: for tests: a rank that sends a wrong number.
        hung: for tests: a rank that never begins.
    """
    check = "collectives"
    if ranks < 2:
        return Finding(check, Verdict.does_not_apply, "this host has one rank")
    answers = answers_of(ranks, _exchange, damaged, hung, most_s=MOST_S)
    if silent := [rank for rank in range(ranks) if rank not in answers]:
        return Finding(check, Verdict.failed, f"ranks {silent} of {ranks} did not answer in time")
    if errors := {rank: answer for rank, answer in answers.items() if isinstance(answer, str)}:
        rank, error = next(iter(errors.items()))
        return Finding(check, Verdict.failed, f"rank {rank} of {ranks}: {error.strip().splitlines()[-1]}")
    wrong = sorted({bad for every, _ in answers.values() for bad in every.wrong_from})
    if wrong or any(summed.wrong_from for _, summed in answers.values()):
        whose = f"numbers of ranks {wrong}" if wrong else "a sum"
        return Finding(check, Verdict.failed, f"{whose} came wrong, of {ranks}")
    slowest = min(min(every.bytes_per_s, summed.bytes_per_s) for every, summed in answers.values()) / 1e9
    kind = "GPUs" if torch.cuda.is_available() else "processes"
    return judge.by_own_best(check, f"{ranks} {kind}", lambda: slowest, share=OWN_SHARE, unit="GB/s")


def _exchange(device: torch.device, damaged: int, hung: int) -> tuple[Exchanged, Exchanged]:
    rank = dist.get_rank()
    if rank == hung:
        time.sleep(2 * MOST_S)
    return all_to_all(device, damage=rank == damaged), all_reduce(device, damage=rank == damaged)
