"""Run a function on ranks of this host, which communicate over NCCL with GPUs, and over gloo without."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.listeners import refuse_other_users
from weft.conf.host.files import scratch_folder
from weft.tools.children import Child, with_news

_ARRIVE_S = 120.0  # imports take long if the disk is cold or the host busy; callers have their own limits


def answers_of(ranks: int, work: Callable[..., Any], *args: Any, most_s: float) -> dict[int, Any]:
    """Return the results of ``work(device, *args)`` on ``ranks`` new processes of this host, one per GPU if it has any.

    Args:
        work: importable. A collective call.
        most_s: time limit in seconds, from when all ranks have started.

    Returns:
        By rank: the result, or the traceback of an error as text. Ranks that did not finish in time are left out.
    """
    with scratch_folder("weft-ranks-") as folder, ExitStack() as stack:
        arguments = ranks, os.path.join(folder, "store"), most_s, work, args
        here = _is_fit_to_fork()
        children = [
            Child(f"rank {rank}", _rank, rank, *arguments, preload=[__name__], from_here=here) for rank in range(ranks)
        ]
        for child in children:
            stack.enter_context(child)
        arrived = _gather(children, _ARRIVE_S)
        return _gather(children, most_s) if len(arrived) == ranks else dict.fromkeys(arrived)


def _is_fit_to_fork() -> bool:
    """Return True if this process has no other thread, and has not used a GPU."""
    return len(os.listdir("/proc/self/task")) == 1 and "libcuda.so" not in Path("/proc/self/maps").read_text()


def _gather(children: Sequence[Child], most_s: float) -> dict[int, Any]:
    """Receive the next value of each rank, or its error; ranks that miss ``most_s`` are left out."""
    answers: dict[int, Any] = {}
    waiting = dict(zip(children, range(len(children)), strict=True))
    deadline = time.monotonic() + most_s
    while waiting and (left := deadline - time.monotonic()) > 0:
        for child in with_news([*waiting], left):
            rank = waiting.pop(child)
            try:
                answers[rank] = child.receive(0.0)
            except RuntimeError as error:
                answers[rank] = str(error)
    return answers


def _rank(
    send: Callable, receive: Callable, rank: int, ranks: int, store: str, most_s: float, work: Callable, args: tuple
) -> None:
    send("here")
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    refuse_other_users(one_host=True)
    # A file of this user's own folder: torch's TCP store would listen on every address.
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=most_s),
    )
    send(work(device, *args))
