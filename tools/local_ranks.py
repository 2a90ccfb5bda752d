"""Run a function on ranks of this host that talk over NCCL where it has GPUs, and over gloo where it has none."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_ARRIVE_S = 120.0  # imports take long where the disk is cold or the host busy; who calls has limits of its own


def answers_of(ranks: int, work: Callable[..., Any], *args: Any, most_s: float) -> dict[int, Any]:
    """What ``work(device, *args)`` returns on each of ``ranks`` new processes of this host; one per GPU, if it has any.

    Args:
        work: importable; a collective call.
        most_s: seconds from when all ranks are there, after which those that have not answered are given up.

    Returns:
        By rank: the result, or the traceback of an error, a text. Ranks that did not answer are left out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes: dict[Connection, int] = {}
    children = []
    with tempfile.TemporaryDirectory(prefix="weft-ranks-") as folder:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            told = (rank, ranks, os.path.join(folder, "store"), sender, most_s, work, args)
            child = context.Process(target=_rank, args=told, daemon=True)
            child.start()
            sender.close()
            pipes[receiver] = rank
            children.append(child)
        try:
            here = _gather(dict(pipes), _ARRIVE_S)
            return _gather(dict(pipes), most_s) if len(here) == ranks else dict.fromkeys(here)
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


def _rank(
    rank: int, ranks: int, store: str, pipe: Connection, most_s: float, work: Callable[..., Any], args: tuple
) -> None:
    pipe.send("here")
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
            timeout=timedelta(seconds=most_s),
        )
        pipe.send(work(device, *args))
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()
        os._exit(0)  # destructors of a group may wait for peers that have ended
