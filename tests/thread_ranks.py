"""Ranks as threads of one process, with torch.distributed over gloo: fast, and mutants see what they do."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld, WorldData

TIMEOUT = timedelta(seconds=20)
MANY_THREADS = 100
"""Number of process groups held only by cycles of references: Python may not collect these before thousands exist."""


class _Worlds(ThreadLocalWorld):
    """The process groups of the rank whose thread asks, or whose thread has started the one that asks."""

    def _get_world(self) -> WorldData:
        return threading.current_thread().__dict__["weft_world"]


@contextmanager
def _inherited() -> Iterator[None]:
    """Threads belong to the rank that starts them."""
    start = threading.Thread.start

    def start_as_mine(thread: threading.Thread) -> None:
        mine = threading.current_thread().__dict__.get("weft_world")
        if mine is not None:
            thread.__dict__.setdefault("weft_world", mine)
        start(thread)

    world = distributed_c10d._world
    threading.Thread.start = start_as_mine  # type: ignore[method-assign]
    distributed_c10d._world = _Worlds()  # type: ignore[assignment]
    _set_thread_isolation_mode(True)  # of torch's register of groups by name
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        threading.Thread.start = start  # type: ignore[method-assign]
        distributed_c10d._world = world


def at_end(close: Callable[[], None]) -> None:
    """Have something closed when this rank ends: hooks of parameters keep what they call for ever."""
    threading.current_thread().__dict__["weft_at_end"].append(close)


def run_in_threads(num_ranks: int, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
    """Return the results of ``function(*args, **more)`` on each rank; raise the first error, if there is one.

    A rank that is done keeps its connections until all are: gloo loses what a peer has not read yet
    when they are closed. After an error they are closed at once, which frees those that wait for it.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []
    all_done = threading.Barrier(num_ranks)

    def run(rank: int) -> None:
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
            results[rank] = function(*args, **more)
            with suppress(threading.BrokenBarrierError):
                all_done.wait()
        except BaseException as error:
            errors.append(error)  # before its end makes others fail
            all_done.abort()
        finally:
            for close in threading.current_thread().__dict__["weft_at_end"]:
                close()
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.__dict__["weft_world"] = WorldData(None, {}, {}, {}, {}, 0, {}, {}, {}, [])
        thread.__dict__["weft_at_end"] = []
    with _inherited():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(os.listdir("/proc/self/task")) > MANY_THREADS:
        gc.collect()
    if errors:
        raise errors[0]
    return results
