"""Clients of the job's store, thousands in a few processes, that ask of it what ranks do when NCCL connects groups."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import perf_counter, process_time, sleep

import torch.distributed as dist

from weft.comm.authenticated_socket import (
    AuthenticatedSocket,
    AuthenticatedUnixSocket,
    Connection,
    connected,
    open_connection,
)
from weft.comm.loopback_proxy import LoopbackProxy
from weft.comm.rendezvous import job_socket, open_store

THREADS = 64
"""In which the clients of one process connect and ask, so that they wait side by side as ranks would."""
FILES_PER_CLIENT = 3
"""That a process has open which authenticates a client and has the store, or has the client; a front has one less."""
ID = b"n" * 128
"""As long as what NCCL's first member of a group tells the others."""


@dataclass(frozen=True)
class Asked:
    """What the clients of one process did.

    Attributes:
        operations: of the store.
        connect_s, ask_s: seconds from when all processes had started until all of their clients were connected, and
            from then to their answers.
        cpu_s: seconds of a processor that this process took for both.
    """

    operations: int
    connect_s: float
    ask_s: float
    cpu_s: float


class _OfManyClients(LoopbackProxy):
    """Does not look each connection up among this process's files, which are as many as there are clients."""

    async def _check_own_process(self, client: object) -> Connection:
        return await open_connection(client)  # type: ignore[arg-type]


def ask_as_many(num_clients: int, group_sizes: Sequence[int], timeout_s: float, fronts: int = 0) -> Asked:
    """One of the processes; the first has the store, the last share the clients.

    Each client is a rank of a job, on an authenticated connection of its own. Of each of its groups it reads the
    identifier that the group's first member has written.

    Args:
        group_sizes: members of the groups that a rank is in.
        fronts: processes that accept and authenticate clients for the store, which then has one file open for each
            client; 0 has the store's process do it, as a job's does, with `FILES_PER_CLIENT`.
    """
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    meeting = open_store(rank, size, timeout)
    behind = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if fronts and not rank else None
    if behind is not None:
        meeting.set("port", str(behind.port))
    if 0 < rank <= fronts:
        port = int(meeting.get("port"))
        LoopbackProxy(partial(_connect, port)).also_accept(_front(rank, listens=True))
    first = 1 + fronts
    own = range(rank - first, num_clients, size - first) if rank >= first else range(0)
    _look_up_files_only()
    _meet(meeting, "started", size)
    begun, begun_cpu_s = perf_counter(), process_time()
    with ThreadPoolExecutor(THREADS) as pool:
        address = _front(1 + rank % fronts) if fronts else job_socket(rank, timeout) if rank else None
        stores = _clients(address, len(own), timeout, pool) if own and address else []
        _meet(meeting, "connected", size)
        met = perf_counter()
        operations = sum(pool.map(partial(_ask, group_sizes), own, stores))
    _meet(meeting, "answered", size)
    answered, cpu_s = perf_counter(), process_time() - begun_cpu_s
    _leave(meeting, rank, size)
    return Asked(operations, met - begun, answered - met, cpu_s)


def _look_up_files_only() -> None:
    """Have this process ask no DNS server for names (glibc).

    torch's client looks up the name of ``::ffff:127.0.0.1``, which no hosts file has, for its log. That is one lookup
    of each rank, and not the store's time; but thousands at once from one machine are more than some DNS servers
    answer, and each that is lost takes 5 s.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def _front(number: int, *, listens: bool = False) -> AuthenticatedUnixSocket:
    """The address of a front, by its rank."""
    return AuthenticatedUnixSocket(f"weft-{os.getuid()}-fronts-{os.environ['MASTER_PORT']}-{number}", listens=listens)


async def _connect(port: int) -> Connection:
    """To the store behind the fronts."""
    return await open_connection(await connected(socket.socket(), ("127.0.0.1", port)))


def _leave(store: dist.Store, rank: int, size: int) -> None:
    """The first process has the store, and ends when all others have had their last answers."""
    if rank:
        with suppress(dist.DistError):  # the first need not wait for this one
            store.add("left", 1)
        return
    while store.add("left", 0) < size - 1:
        sleep(0.01)


def _clients(
    address: AuthenticatedSocket, count: int, timeout: timedelta, pool: ThreadPoolExecutor
) -> list[dist.TCPStore]:
    proxy = _OfManyClients(address.connect)

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
