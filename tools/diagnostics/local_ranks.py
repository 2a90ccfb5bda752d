"""Collectives between the devices of this host, or between processes where there are none."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from weft.engine.supervision.finding import Finding, Verdict
from weft.tools.diagnostics.exchange import Exchanged, all_reduce, all_to_all
from weft.tools.diagnostics.judging import Judge

OWN_SHARE = 0.3
"""Least share of the best rate of this host."""
MOST_S = 15.0
"""Seconds from when all ranks are there, after which one that has not answered is named."""
_ARRIVE_S = 120.0  # imports take long where the disk is cold or the host busy; who calls has limits of its own


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
    answers = _run(ranks, damaged, hung)
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


def _run(ranks: int, damaged: int, hung: int) -> dict[int, Any]:
    """Each rank's `Exchanged` of both operations, or its error; ranks that do not answer are left out."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes: dict[Connection, int] = {}
    children = []
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as folder:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            args = (rank, ranks, os.path.join(folder, "store"), sender, rank == damaged, rank == hung)
            child = context.Process(target=_rank, args=args, daemon=True)
            child.start()
            sender.close()
            pipes[receiver] = rank
            children.append(child)
        try:
            here = _gather(dict(pipes), _ARRIVE_S)
            return _gather(dict(pipes), MOST_S) if len(here) == ranks else dict.fromkeys(here)
        finally:
            for child in children:
                child.kill()
                child.join()


def _gather(pipes: dict[Connection, int], most_s: float) -> dict[int, Any]:
    """The next message of each rank that comes in time."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + most_s
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                answers[rank] = "it ended without a word"
    return answers


def _rank(rank: int, ranks: int, store: str, pipe: Connection, damaged: bool, hung: bool) -> None:
    pipe.send("here")
    if hung:
        time.sleep(2 * MOST_S)
    try:
        torch.set_num_threads(1)
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # A file of this user's own folder: torch's TCP store would listen on every address.
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=MOST_S),
        )
        results: tuple[Exchanged, Exchanged] = (all_to_all(device, damage=damaged), all_reduce(device, damage=damaged))
        pipe.send(results)
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()
        os._exit(0)  # destructors of a group may wait for peers that have ended
