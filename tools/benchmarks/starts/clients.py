"""Clients of the job's store, thousands in a few processes, that ask of it what ranks do when NCCL connects groups."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import perf_counter, sleep

import torch.distributed as dist

from weft.comm.authenticated_socket import Streams, streams
from weft.comm.loopback_proxy import LoopbackProxy
from weft.comm.rendezvous import job_socket, open_store

THREADS = 64
"""In which the clients of one process connect and ask, so that they wait side by side as ranks would."""
ID = b"n" * 128
"""As long as what NCCL's first member of a group tells the others."""


@dataclass(frozen=True)
class Asked:
    """What the clients of one process did.

    Attributes:
        operations: of the store.
        connect_s, ask_s: seconds until all clients of all processes were connected, and from then to their answers.
    """

    operations: int
    connect_s: float
    ask_s: float


class _OfManyClients(LoopbackProxy):
    """Does not look each connection up among this process's files, which are as many as there are clients."""

    async def _check_own_process(self, client: object) -> Streams:
        return await streams(client)  # type: ignore[arg-type]


def ask_as_many(num_clients: int, group_sizes: Sequence[int], timeout_s: float) -> Asked:
    """One of the processes; the first has the store, the others share the clients.

    Each client is a rank of a job, on an authenticated connection of its own. Of each of its groups it reads the
    identifier that the group's first member has written.

    Args:
        group_sizes: members of the groups that a rank is in.
    """
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    meeting = open_store(rank, size, timeout)
    own = range(rank - 1, num_clients, size - 1) if rank else range(0)
    begun = perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        stores = _clients(rank, len(own), timeout, pool)
        _meet(meeting, "connected", size)
        connected = perf_counter()
        operations = sum(pool.map(partial(_ask, group_sizes), own, stores))
    _meet(meeting, "answered", size)
    answered = perf_counter()
    _leave(meeting, rank, size)
    return Asked(operations, connected - begun, answered - connected)


def _leave(store: dist.Store, rank: int, size: int) -> None:
    """The first process has the store, and ends when all others have had their last answers."""
    if rank:
        with suppress(dist.DistError):  # the first need not wait for this one
            store.add("left", 1)
        return
    while store.add("left", 0) < size - 1:
        sleep(0.01)


def _clients(rank: int, count: int, timeout: timedelta, pool: ThreadPoolExecutor) -> list[dist.TCPStore]:
    if not count:
        return []
    proxy = _OfManyClients(job_socket(rank, timeout).connect)

    def connect(_: int) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", proxy.port, is_master=False, timeout=timeout, wait_for_workers=False)

    return list(pool.map(connect, range(count)))


def _ask(group_sizes: Sequence[int], client: int, store: dist.TCPStore) -> int:
    """All that one client asks: number of operations. What it leads it writes first, so that nobody waits in a ring."""
    places = [(f"{number}/{client // members}", client % members) for number, members in enumerate(group_sizes)]
    for key, place in sorted(places, key=lambda at: at[1] > 0):
        store.get(key) if place else store.set(key, ID)
    return len(places)


def _meet(store: dist.Store, name: str, size: int) -> None:
    """Wait for all processes."""
    if store.add(name, 1) == size:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])
