"""Rules of NCCL that concern all ranks of a job on emulated devices, and reports of ranks that wait too long."""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import sleep
from typing import Any

import torch
import torch.distributed as dist

from tests.device import cuda
from weft.comm.backends import GLOO
from weft.comm.links import Sites

TIMEOUT = timedelta(seconds=600)
"""Timeout of gloo, and of a rank that waits for others, if `limit` sets none."""
bound = False
"""As if a device had been given to `init_process_group`: the whole world takes part in the making of every group, and a
group has one communicator for all."""
_limit = TIMEOUT
_new_group = dist.new_group


class StuckError(RuntimeError):
    """A rank waits for what will not come; says where it and other such ranks stand."""


def join(limit_s: float, *, bound_device: bool = False, sites: Sites | None = None) -> torch.device:
    """Join the job, and keep its rules.

    Args:
        limit_s: see `limit`.
        bound_device: see `bound`.
        sites: of a job over several, whose groups inside a site have NCCL's rules.
    """
    from weft.engine.distributed import init_distributed

    global bound
    bound = bound_device
    limit(limit_s)
    device = init_distributed(TIMEOUT.total_seconds(), sites=sites)
    keep_order(dist.distributed_c10d._get_default_store())
    return device


def limit(limit_s: float) -> None:
    """Give up what waits longer, with `StuckError`, or `RuntimeError` if it waits for the device.

    A host that needs a value from the device then waits until everything that communicates has ended, as behind
    spinning kernels it must.
    """
    global _limit
    _limit = timedelta(seconds=limit_s)
    cuda.native.emulated_set_limit(ctypes.c_double(limit_s))


def meet(store: dist.Store, key: str, count: int, what: str) -> None:
    """Wait on the host until ``count`` ranks have come.

    Raises:
        StuckError: it takes longer than the limit.
    """
    if store.add(f"{key}/come", 1) == count:
        store.set(key, "")
    try:
        store.wait([key], _limit)
    except dist.DistStoreError:
        raise StuckError(_stuck(what)) from None


def _stuck(what: str) -> str:
    rank, store = dist.get_rank(), dist.PrefixStore("stuck", dist.distributed_c10d._get_default_store())
    stack = "".join(traceback.format_stack(sys._getframe(2)))
    store.set(f"{rank}", f"rank {rank} waits for {what}, called from\n{stack}")
    sleep(1.0)  # other ranks that are stuck give up at about the same time
    return "\n".join(
        store.get(f"{other}").decode() for other in range(dist.get_world_size()) if store.check([f"{other}"])
    )


def keep_order(store: dist.Store) -> None:
    """Refuse groups that ranks do not make in the same order, members or not."""
    calls, store = iter(range(1 << 30)), dist.PrefixStore("order", store)

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **named: Any) -> Any:
        number = next(calls)
        wish = f"{list(ranks) if ranks is not None else 'all'}"
        first = store.compare_set(f"{number}", "", wish).decode()
        if first != wish:
            raise RuntimeError(f"group {number}: rank {dist.get_rank()} makes {wish}, another rank made {first}")
        outside = ranks is not None and dist.get_rank() not in ranks
        if bound and (outside or named.get("backend") not in ("gloo", GLOO)):  # members of a gloo group make no split
            meet(store, f"{number}/all", dist.get_world_size(), f"the making of group {number}, {wish}")
        return _new_group(ranks, *args, **named)

    dist.new_group = new_group


def count_waits_for_sites() -> None:
    """Count a wait of the host for whoever waits in the main thread for what a group over sites does."""
    from weft.comm.wan.sites.work import CollectiveWork, TransferWork  # jobs of one site do without

    def counted(wait: Callable[..., bool]) -> Callable[..., bool]:
        def waiting(work: dist.Work, *args: Any) -> bool:
            if threading.current_thread() is threading.main_thread():
                cuda.native.emulated_count_wait(b"a group over sites")
            return wait(work, *args)

        return waiting

    for kind in (CollectiveWork, TransferWork):
        kind.wait = counted(kind.wait)
