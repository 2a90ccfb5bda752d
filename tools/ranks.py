"""Run functions on ranks: new processes on this machine, with a hard time limit, none left behind."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

from weft.conf.ports import free_port

PRELOADED = ["weft.tools.rank_server"]
"""Module to import once before forking, because it takes seconds and is the same for every rank."""
LOG_TAIL_CHARS = 3000
"""Most characters of a failed rank's output to show."""


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    meanwhile: Callable[[], object] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on every rank; returns each rank's result.

    Each rank is a process forked from a server that has imported torch and DeepSpeed and done
    nothing else. Its output goes to a file, which is shown only if it fails. Ranks are killed
    when this function ends, and end by themselves if this process dies.

    Args:
        function: importable; returns plain data. It finds the usual RANK, WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT.
        timeout_s: seconds after which the run is given up.
        meanwhile: called again and again until the first rank has ended.

    Raises:
        RuntimeError: a rank failed, with its traceback, or the time was up.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="weft-ranks-") as folder:
        pipes, children = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            log = Path(folder, f"rank{rank}.log")
            child = context.Process(
                target=_rank, args=(rank, num_ranks, port, timeout_s, log, sender, function, args), daemon=True
            )
            child.start()
            sender.close()
            pipes.append(receiver)
            children.append(child)
        try:
            deadline = monotonic() + timeout_s
            while meanwhile is not None and not multiprocessing.connection.wait(pipes, 0.0) and monotonic() < deadline:
                meanwhile()
            return _collect(pipes, Path(folder), deadline, timeout_s)
        finally:
            for child in children:
                child.kill()
                child.join()


def _collect(pipes: list[Connection], folder: Path, deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {rank: pipe for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=max(0.0, deadline - monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting)} had not ended after {timeout_s:g} s")
        for rank, pipe in waiting.items():
            if pipe not in ready:
                continue
            try:
                done, value = pipe.recv()
            except EOFError:
                done, value = False, "it ended without a word"
            if not done:
                log = (folder / f"rank{rank}.log").read_text(errors="replace")[-LOG_TAIL_CHARS:]
                raise RuntimeError(f"rank {rank} failed: {value}\n{log}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, num_ranks: int, port: int, timeout_s: float, log: Path, pipe: Connection, function: Callable, args: tuple
) -> None:
    end_with_parent()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    from weft.comm.sites.joining import leave

    torch.set_num_threads(1)
    try:
        result = function(*args)
        leave()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # destructors of a process group may wait for peers that have ended


def end_with_parent() -> None:
    """End this process, which `multiprocessing` started, as soon as the one that started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
