"""Collectives whose results are known: sums and exchanges of whole numbers, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.conf.host.diagnosis import CheckResult, Outcome
from weft.tools.diagnostics.judging import Judge
from weft.tools.local_ranks import answers_of

_NUMBERS = 1 << 21  # int32, 8 MiB


@dataclass(frozen=True)
class Exchanged:
    """A rank's measurement of a collective.

    Attributes:
        bytes_per_s: bytes per second sent by the rank, in the best of a few rounds.
        wrong_from: ranks whose contribution arrived wrong; all ranks if the collective does not distinguish them.
    """

    bytes_per_s: float
    wrong_from: tuple[int, ...] = ()


Clock = Callable[[], float]


def all_to_all(
    device: torch.device, *, rounds: int = 3, damage: bool = False, clock: Clock = time.perf_counter
) -> Exchanged:
    """Send distinct numbers from every rank to every rank. A collective call.

    Args:
        damage: for tests: this rank sends one wrong number.
        clock: returns seconds; process time excludes other processes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    share = _NUMBERS // size
    sent = torch.cat([_numbers(rank, other, share, device) for other in range(size)])
    if damage:
        sent[-1 if rank != size - 1 else 0] ^= 1
    received = torch.empty_like(sent)
    seconds = _best(device, rounds, lambda: dist.all_to_all_single(received, sent), clock)
    wrong = tuple(
        other
        for other, piece in enumerate(received.split(share))
        if not torch.equal(piece, _numbers(other, rank, share, device))
    )
    return Exchanged(4 * share * (size - 1) / seconds, wrong)


def all_reduce(
    device: torch.device, *, rounds: int = 3, damage: bool = False, clock: Clock = time.perf_counter
) -> Exchanged:
    """Sum known numbers over all ranks. A collective call. See `all_to_all`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    begun = _numbers(rank, 0, _NUMBERS, device) & 0xFFFF
    if damage:
        begun[_NUMBERS // 2] ^= 1
    wanted = sum((_numbers(other, 0, _NUMBERS, device) & 0xFFFF for other in range(size)), torch.zeros_like(begun))
    held = begun.clone()

    def reduce() -> None:
        held.copy_(begun)
        dist.all_reduce(held)

    seconds = _best(device, rounds, reduce, clock)
    wrong = () if torch.equal(held, wanted) else tuple(range(size))
    return Exchanged(2 * 4 * _NUMBERS * (size - 1) / size / seconds, wrong)


def with_neighbour(
    other: int, device: torch.device, *, rounds: int = 3, damage: bool = False, pause_s: float = 0.0
) -> Exchanged:
    """Exchange numbers with rank ``other``, sending and receiving at the same time; both ranks call it.

    Args:
        damage: for tests: this rank sends one wrong number.
        pause_s: for tests: seconds by which this rank is slower.
    """
    rank = dist.get_rank()
    sent = _numbers(rank, other, _NUMBERS, device)
    if damage:
        sent[7] ^= 1
    received = torch.empty_like(sent)

    def swap() -> None:
        time.sleep(pause_s)
        pair = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    seconds = _best(device, rounds, swap)
    right = torch.equal(received, _numbers(other, rank, _NUMBERS, device))
    return Exchanged(4 * _NUMBERS / seconds, () if right else (other,))


def _numbers(sender: int, receiver: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the numbers from ``sender`` to ``receiver``: int32 [count]."""
    return torch.arange(count, dtype=torch.int32, device=device) * 2654435 + sender * 7919 + receiver * 104729


def _best(device: torch.device, rounds: int, work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    seconds = float("inf")
    work()  # connections are made
    for _ in range(rounds):
        begun = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, clock() - begun)
    return seconds


OWN_SHARE = 0.3
"""Minimum share of the best rate of this host."""
MOST_S = 15.0
"""Seconds from when all ranks are there, after which one that has not answered is named."""


def check_local_collectives(ranks: int, judge: Judge, *, damaged: int = -1, hung: int = -1) -> CheckResult:
    """Measure an all-to-all and an all-reduce among ``ranks`` processes, in gigabytes per second of the slowest rank.

    Without GPUs, only the processor time of the ranks counts, which other processes do not affect.

    Args:
        ranks: number of ranks on this host; with GPUs, one per GPU.
        damaged: for tests: a rank that sends a wrong number.
        hung: for tests: a rank that never begins.
    """
    check = "collectives"
    if ranks < 2:
        return CheckResult(check, Outcome.does_not_apply, "this host has one rank")
    answers = _answers(ranks, damaged, hung)
    if silent := [rank for rank in range(ranks) if rank not in answers]:
        return CheckResult(check, Outcome.failed, f"ranks {silent} of {ranks} did not answer in time")
    if errors := {rank: answer for rank, answer in answers.items() if isinstance(answer, str)}:
        rank, error = next(iter(errors.items()))
        return CheckResult(check, Outcome.failed, f"rank {rank} of {ranks}: {error.strip().splitlines()[-1]}")
    wrong = sorted({bad for every, _ in answers.values() for bad in every.wrong_from})
    if wrong or any(summed.wrong_from for _, summed in answers.values()):
        whose = f"numbers of ranks {wrong}" if wrong else "a sum"
        return CheckResult(check, Outcome.failed, f"{whose} came wrong, of {ranks}")
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
