"""Collectives between the devices of this host, or between processes where there are none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from weft.conf.host.diagnosis import Finding, Verdict
from weft.tools.diagnostics.exchange import Exchanged, all_reduce, all_to_all
from weft.tools.diagnostics.judging import Judge
from weft.tools.local_ranks import answers_of

OWN_SHARE = 0.3
"""Minimum share of the best rate of this host."""
MOST_S = 15.0
"""Seconds from when all ranks are there, after which one that has not answered is named."""


def check_local_collectives(ranks: int, judge: Judge, *, damaged: int = -1, hung: int = -1) -> Finding:
    """Measure an all-to-all and an all-reduce among ``ranks`` processes, in gigabytes per second of the slowest rank.

    Without GPUs, only the processor time of the ranks counts, which other processes do not affect.

    Args:
        ranks: number of ranks on this host; with GPUs, one per GPU.
        damaged: for tests: a rank that sends a wrong number.
        hung: for tests: a rank that never begins.
    """
    check = "collectives"
    if ranks < 2:
        return Finding(check, Verdict.does_not_apply, "this host has one rank")
    answers = _answers(ranks, damaged, hung)
    if silent := [rank for rank in range(ranks) if rank not in answers]:
        return Finding(check, Verdict.failed, f"ranks {silent} of {ranks} did not answer in time")
    if errors := {rank: answer for rank, answer in answers.items() if isinstance(answer, str)}:
        rank, error = next(iter(errors.items()))
        return Finding(check, Verdict.failed, f"rank {rank} of {ranks}: {error.strip().splitlines()[-1]}")
    wrong = sorted({bad for every, _ in answers.values() for bad in every.wrong_from})
    if wrong or any(summed.wrong_from for _, summed in answers.values()):
        whose = f"numbers of ranks {wrong}" if wrong else "a sum"
        return Finding(check, Verdict.failed, f"{whose} came wrong, of {ranks}")
    kind = "GPUs" if torch.cuda.is_available() else "processes, by processor time"
    known = [answers]  # measured again only where it is too low
    return judge.by_own_best(
        check,
        f"{ranks} {kind}",
        lambda: _slowest(known.pop() if known else _answers(ranks, damaged, hung)),
        share=OWN_SHARE,
        unit="GB/s",
    )


def _answers(ranks: int, damaged: int, hung: int) -> dict[int, Any]:
    return answers_of(ranks, _exchange, damaged, hung, most_s=MOST_S)


def _slowest(answers: Mapping[int, Any]) -> float:
    """Return the gigabytes per second of the slowest rank, or 0 if a rank sent no result."""
    if not all(isinstance(answer, tuple) for answer in answers.values()):
        return 0.0
    return min((each.bytes_per_s / 1e9 for answer in answers.values() for each in answer), default=0.0)


def _exchange(device: torch.device, damaged: int, hung: int) -> tuple[Exchanged, Exchanged]:
    rank = dist.get_rank()
    if rank == hung:
        time.sleep(2 * MOST_S)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    return all_to_all(device, damage=rank == damaged, clock=clock), all_reduce(
        device, damage=rank == damaged, clock=clock
    )
