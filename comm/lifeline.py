"""A job's lifeline: neighbours in a ring detect a rank that dies, and notify all others.

An NCCL kernel waits for a dead rank until its communicator is aborted, and the host waits for the kernel. A gloo
connection, however, breaks when its process ends. So each rank keeps a gloo receive posted from the previous and the
next rank of a ring. If a receive fails, the rank notifies its other neighbour and aborts its own NCCL communicators,
which frees its device. It does so between steps too: a gather of weights may still wait for the dead rank then, and the
host for the gather.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.backends import on_host
from weft.comm.channel import ChannelError
from weft.conf.host.threads import Thread

_TAG = 1
"""The tag of the lifeline's messages; ready-to-send messages have 0."""
_LEAVES = -1
"""In place of a lost rank's number: the sender closes in order."""
_POLL_S = 0.05
GRACE_S = 1.0
"""Seconds that a device has to end its work after a rank has ended, because that work may not need the rank."""
_FAREWELL = timedelta(seconds=5)


class Lifeline:
    """Detects that another rank has died, reports which one, and frees this rank's device. See the module."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Post the receives, on threads of their own. A collective call over the world.

        Args:
            group: a group of the whole world, in host memory.
        """
        self._group = group
        self._me, size = dist.get_rank(), dist.get_world_size()
        self._neighbours = {(self._me - 1) % size, (self._me + 1) % size} - {self._me}
        self._changing = threading.Lock()
        self._lost: int | None = None
        self._closed = False
        self._works: list[dist.Work | None] = []
        self.on_loss: Callable[[ChannelError], None] = lambda error: None
        """Called on a thread when a rank is lost, to make this rank's waits fail."""
        for peer in self._neighbours:
            Thread(self._listen, peer, name=f"weft lifeline to {peer}").start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark the block as communication with other ranks. Errors in it that follow a rank's death name that rank.

        Raises:
            ChannelError: a rank is lost.
        """
        self.check()
        try:
            yield
        except Exception as error:
            self._grant_grace(error)
            if self._lost is not None:
                raise self._error() from error
            raise
        self.check()

    def check(self) -> None:
        """Raise ChannelError if a rank is lost."""
        if self._lost is not None:
            raise self._error()

    def close(self, *, leaving: bool = False) -> None:
        """Notify the neighbours that this rank closes in order. This ends their threads, and theirs end this rank's.

        Args:
            leaving: True if neighbours may have ended already. Then do not wait for the messages to arrive.
        """
        with self._changing:
            if self._closed:
                return
            self._closed = True
        for peer in self._neighbours:
            with suppress(RuntimeError):
                work = self._send(peer, _LEAVES)
                self._works.append(work)
                if not leaving:
                    work.wait(_FAREWELL)

    # -- on the threads --------------------------------------------------------------------------

    def _listen(self, peer: int) -> None:
        said = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(said, peer, group=self._group, tag=_TAG)
        except (RuntimeError, ValueError):  # ValueError: the group has been destroyed
            return self._lose(peer, heard_from=peer)
        lost = int(said)
        if lost != _LEAVES:
            self._lose(lost, heard_from=peer)

    def _lose(self, rank: int, *, heard_from: int) -> None:
        with self._changing:
            if self._lost is not None or self._closed:
                return
            self._lost = rank
        for peer in self._neighbours - {rank, heard_from}:
            with suppress(RuntimeError):
                self._works.append(self._send(peer, rank))
        self.on_loss(self._error())
        limit = monotonic() + GRACE_S
        while not self._closed and monotonic() < limit:
            sleep(_POLL_S)
        if not self._closed:
            abort_devices_groups()

    def _send(self, peer: int, what: int) -> dist.Work:
        work = dist.isend(torch.tensor([what]), peer, group=self._group, tag=_TAG)
        assert work is not None, "the group is the world's"
        return work

    def _error(self) -> ChannelError:
        return ChannelError(f"rank {self._lost} has ended or cannot be reached")

    def _grant_grace(self, error: Exception) -> None:
        """Wait up to `GRACE_S` for the report of a lost rank, because ``error`` may be its consequence."""
        if not isinstance(error, RuntimeError):
            return
        limit = monotonic() + GRACE_S
        while self._lost is None and monotonic() < limit:
            sleep(_POLL_S)


def abort_devices_groups() -> None:
    """Abort the NCCL communicators of this process, from any thread. Results on the device are invalid afterwards."""
    groups = [group for group in list(dist.distributed_c10d._world.pg_map) if not on_host(group)]  # torch 2.11 to 2.13
    nccl = next(filter(None, map(_nccl, groups)), None)
    if nccl is not None:  # grouped, because otherwise one abort may wait for another
        nccl._group_start()
    for group in groups:
        group.abort()
    if nccl is not None:
        nccl._group_end()


def _nccl(group: dist.ProcessGroup) -> Any:
    with suppress(RuntimeError):  # it has none for GPUs
        backend = group._get_backend(torch.device("cuda"))
        return backend if hasattr(backend, "_group_start") else None
    return None
