"""A process group that keeps NCCL's rules between ranks; gloo moves the bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from tests.nccl_rules.device import Device, Operation, Stream
from tests.nccl_rules.host import HostRules, is_on_host
from tests.nccl_rules.operations import TIMEOUT, NcclOperations
from weft.comm import backends, lifeline
from weft.comm.links import Sites

SERVED = "WEFT_TEST_STORE_IS_SERVED"
"""Set where the job's store is not rank 0's own."""


class StrictGroup(NcclOperations):
    """NCCL's rules on CPUs. A launched operation holds the device until its peers have come to it, too."""

    BACKEND = "strict"

    def __init__(self, device: Device, store: dist.Store, ranks: Sequence[int], me: int, *, bound: bool) -> None:
        super().__init__(store, ranks, me, bound=bound)
        self._device = device
        self._streams: dict[str, Stream] = {}
        self._aborted = False

    def shutdown(self) -> None:
        """End the streams."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._connections.clear()

    def abort(self) -> None:
        """End the streams at once; nothing can be launched any more."""
        self._aborted = True
        for stream in list(self._streams.values()):
            stream.abort()

    def barrier(self, opts: Any = None) -> Operation:
        """Blocks the host, as with NCCL."""
        work = self._collective("barrier", [], [], lambda gloo, *_: gloo.barrier())
        work.wait()
        return work

    _is_on_host = staticmethod(is_on_host)

    def _hold(self, key: str, what: str) -> None:
        self._device.hold(lambda: self._store.check([key]), what)

    def _launch(self, stream: str, what: str, reads: list[Tensor], writes: list[Tensor], run: Callable) -> Operation:
        if self._aborted:
            raise RuntimeError(f"{self._label()}: the communicator was aborted")
        if stream not in self._streams:
            self._streams[stream] = Stream(f"strict {self._name} {stream}")
        return self._device.launch(self._streams[stream], what, lambda: run(reads, writes))


@cache
def _store() -> dist.Store:
    """The job's store, which outlives the attempts of a process."""
    return _open_store(is_master=int(os.environ["RANK"]) == 0 and SERVED not in os.environ)


def serve_store() -> dist.Store:
    """Serve the store from this process, so that a forked rank 0 can die without it."""
    store = _open_store(is_master=True)
    os.environ[SERVED] = "1"
    return store


def _open_store(*, is_master: bool) -> dist.Store:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    world = int(os.environ["WORLD_SIZE"])
    return dist.TCPStore(*address, world, is_master=is_master, timeout=TIMEOUT, wait_for_workers=False)


def join(limit_s: float = 20.0, *, bound: bool = False, sites: Sites | None = None, attempt: int = 0) -> Device:
    """Make the default process group of this rank a strict one, and put the host under its rules.

    Groups that ask for gloo get gloo.

    Args:
        limit_s: after which what waits is stuck.
        bound: as if a device had been given to `init_process_group`: the whole world takes part in the making
            of every group, and a group has one communicator for all.
        sites: of a job over several, whose groups inside a site are strict ones.
        attempt: counts those of a job, and of a process that takes part in several.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"attempt {attempt}", _store())
    device = Device(rank, dist.PrefixStore("strict", store), _store(), limit_s)

    def strict(store: dist.Store, me: int, size: int, options: Any) -> StrictGroup:
        ranks = options.global_ranks_in_group or range(size)
        return StrictGroup(device, store, ranks, me, bound=bound)

    def make(options: Any, given: Any) -> Any:
        if sites is None:
            return strict(options.store, options.group_rank, options.group_size, options)
        return backends.create_group(options, given, inside=strict)

    backend = backends.NCCL if sites is not None else "strict"
    dist.Backend._plugins.pop(backend.upper(), None)
    dist.Backend.register_backend(backend, make, extended_api=True, devices=["cpu"])
    made = dist.new_group
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, pg_options=sites)
    _keep_one_order(device, dist.PrefixStore("order", store), blocking=bound)
    with ExitStack() as stack:
        stack.enter_context(HostRules(device))
        stack.enter_context(patch.object(lifeline, "record_event", lambda _: device.record_event()))
        stack.callback(setattr, dist, "new_group", made)
        if sites is not None:
            stack.enter_context(waits_for_other_sites(device))
        device.leave = stack.pop_all().close
    return device


@contextmanager
def waits_for_other_sites(device: Device) -> Iterator[None]:
    """Note that whoever waits for what a group over sites does holds up the host."""
    from weft.comm.wan.sites.group import SiteGroup  # jobs of one site do without
    from weft.comm.wan.sites.work import CollectiveWork, TransferWork

    def noting(wait: Callable[..., bool]) -> Callable[..., bool]:
        def waiting(work: dist.Work, *args: Any) -> bool:
            if threading.current_thread() is threading.main_thread():
                device.waits("a group over sites")
            return wait(work, *args)

        return waiting

    def ruled(run: Callable[..., Any]) -> Callable[..., Any]:
        """Torch has taken the rules away on the way here: it has asked them about the call of `torch.distributed`."""

        def running(group: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return run(group, *args, **named)
            with HostRules(device):
                return run(group, *args, **named)

        return running

    with ExitStack() as stack:
        for kind, name, wrapped in (
            (CollectiveWork, "wait", noting),
            (TransferWork, "wait", noting),
            *((SiteGroup, name, ruled) for name in ("send", "recv", "_launch")),
        ):
            stack.enter_context(patch.object(kind, name, wrapped(getattr(kind, name))))
        yield


def _keep_one_order(device: Device, store: dist.Store, *, blocking: bool) -> None:
    """Every rank makes the same groups in the same order, members or not.

    Args:
        blocking: all of them take part in each, as in a split of the world's communicator.
    """
    made, calls = dist.new_group, iter(range(1 << 30))

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **named: Any) -> Any:
        number = next(calls)
        wish = f"{list(ranks) if ranks is not None else 'all'}"
        first = store.compare_set(f"{number}", "", wish).decode()
        if first != wish:
            raise RuntimeError(f"group {number}: rank {device.rank} makes {wish}, another rank made {first}")
        outside = ranks is not None and device.rank not in ranks
        if blocking and (outside or named.get("backend") != "gloo"):  # members of a gloo group make no split
            if store.add(f"{number}/come", 1) == dist.get_world_size():
                store.set(f"{number}/all", "")
            device.hold(lambda: store.check([f"{number}/all"]), f"the making of group {number}, {wish}")
        return made(ranks, *args, **named)

    dist.new_group = new_group
