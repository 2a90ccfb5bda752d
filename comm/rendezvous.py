"""Where the ranks of a job meet: torch's store, behind a door that opens for ranks of this job alone.

torch's own store listens on every address of its host, and does what anybody tells it. Here it
hears nobody but its own process. The other ranks come in by a door: a Unix socket where all of
them are on one host, whose kernel says who knocks; a TCP port of one address where they are not,
at which both sides prove that they hold ``WEFT_KEY``. See docs/decisions/rendezvous.md.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from weft.comm.gateway import CredentialDoor, Door, Gateway, KeyDoor, Vault
from weft.conf.hosts import is_loopback

METHOD = "weft://"
"""What `torch.distributed.init_process_group` takes as ``init_method`` for this rendezvous."""
_DOOR = "weft/door"

log = logging.getLogger(__name__)


def register() -> None:
    """Teach `torch.distributed` the init_method ``weft://``; once more does nothing."""
    try:
        dist.register_rendezvous_handler(METHOD.partition(":")[0], _meet)
    except RuntimeError:  # it is known already
        return


def made_here() -> bool:
    """Whether the default process group met by ``weft://``."""
    return dist.distributed_c10d._default_pg_init_method == METHOD  # torch 2.11 to 2.13


def _meet(url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """As torch asks of a rendezvous handler: the store, this rank and the number of ranks.

    Raises:
        ValueError: no key where one is needed, or the door's address cannot be had.
        dist.DistNetworkError: the others did not come in time.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    yield (dist.HashStore() if size == 1 else open_store(rank, size, timeout)), rank, size
    raise RuntimeError("ranks meet once; start the job anew")


def open_store(rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """The store of the job that the launcher's environment describes; a collective call, errors as of `_meet`."""
    door = _door(rank, timeout)
    _choose_interface(door)
    if rank == 0:
        vault = Vault.open()
        gateway = Gateway(vault.enter, host=vault.SIDE, port=vault.port)
        gateway.open_door(door)
        return dist.TCPStore(
            vault.SIDE, vault.port, size, is_master=True, timeout=timeout, master_listen_fd=vault.listener.detach()
        )
    gateway = Gateway(door.enter)
    gateway.try_way(timeout.total_seconds())
    return dist.TCPStore("127.0.0.1", gateway.port, size, is_master=False, timeout=timeout)


def _door(rank: int, timeout: timedelta) -> Door:
    """The door as the environment places it; on rank 0 it listens when this returns."""
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if _alone_on_host(master):
        return CredentialDoor(f"weft-{os.getuid()}-{master}-{port}", listens=rank == 0)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return KeyDoor((own_address(), port) if rank == 0 else (master, port), listens=rank == 0)
    # torchrun's agent has its store at that port. All that it is asked is where our door is: an unauthenticated peer
    # who answers instead fails to prove the key.
    agent = dist.TCPStore(master, port, is_master=False, timeout=timeout)
    place = f"{_DOOR}/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    if rank == 0:
        door = KeyDoor((own_address(), 0), listens=True)
        agent.set(place, "{} {}".format(*door.address))
        return door
    host, _, number = agent.get(place).decode().partition(" ")
    return KeyDoor((host, int(number)), listens=False)


def _alone_on_host(master: str) -> bool:
    """Whether all ranks are on this host, as the launcher tells, or the master's address does."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return is_loopback(master) or told == os.environ["WORLD_SIZE"]


def own_address() -> str:
    """This host's address on the way to the job's first rank.

    Raises:
        ValueError: MASTER_ADDR names no address.
    """
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        family, kind, *_, address = socket.getaddrinfo(master, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)  # sends nothing: it only asks for the route
            return way.getsockname()[0]
    except OSError as error:
        raise ValueError(f"MASTER_ADDR={master}: {error.strerror}; set cluster.master_addr to rank 0's host") from error


def _choose_interface(door: Door) -> None:
    """Have gloo (and NCCL on a single host) listen where the ranks are, and not on whatever the host is named after."""
    if isinstance(door, CredentialDoor):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return
    mine = own_address()
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == mine for entry in entries):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
