"""The rendezvous handler ``weft://``: torch's store, reachable by authenticated ranks of this job only.

torch's own store listens on every address of its host without authentication. Here it accepts
connections of its own process only. The other ranks connect through an authenticated socket. If all ranks are on one
host, it is a Unix socket, and the kernel reports the peer's user. Otherwise it is a TCP port on one address, with TLS
certificates derived from ``WEFT_KEY``. See docs/decisions/rendezvous.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from weft.comm.authenticated_socket import RUN, AuthenticatedSocket, AuthenticatedTcpSocket, AuthenticatedUnixSocket
from weft.comm.listeners import refuse_other_users
from weft.comm.loopback_proxy import LoopbackProxy, ProcessLocalPort
from weft.comm.message_stream import address_towards
from weft.conf.hosts import is_loopback

METHOD = "weft://"
"""The ``init_method`` of `torch.distributed.init_process_group` for this rendezvous."""
_READ_TOGETHER = "GLOO_ENABLE_STORE_V2_API"
"""Variable that lets gloo read the addresses of all members of a group in one store operation, not two per member."""
_ADDRESS_KEY = "weft/store_address"
"""Key of torchrun's store under which rank 0 publishes the address of the authenticated socket."""

log = logging.getLogger(__name__)


@dataclass
class _Listener:
    """Rank 0's listener and proxy for the rendezvous, if its store is behind the port that all hosts use."""

    address: tuple[str, int] = ("", 0)
    proxy: LoopbackProxy | None = None


_LISTENER = _Listener()


def register() -> None:
    """Register the init_method ``weft://`` with `torch.distributed`; idempotent."""
    try:
        dist.register_rendezvous_handler(METHOD.partition(":")[0], _rendezvous)
    except RuntimeError:  # registered already
        return


def made_here() -> bool:
    """True if the default process group was made by ``weft://``."""
    return dist.distributed_c10d._default_pg_init_method == METHOD  # torch 2.11 to 2.13


def _rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the store, this rank and the number of ranks: torch's rendezvous handler."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    yield (dist.HashStore() if size == 1 else open_store(rank, size, timeout)), rank, size
    raise RuntimeError("the rendezvous cannot be repeated; restart the job")


def open_store(rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store of the job in the launcher's environment. Collective. For errors see `_rendezvous`."""
    address = job_socket(rank, timeout)
    refuse_other_users(one_host=on_one_host())
    _choose_interface(address)
    os.environ.setdefault(_READ_TOGETHER, "1")
    _LISTENER.address, _LISTENER.proxy = _Listener.address, None
    if rank == 0:
        local = ProcessLocalPort.open()
        proxy = LoopbackProxy(local.connect, host=local.PROXY_HOST, port=local.port)
        proxy.also_accept(address)
        if isinstance(address, AuthenticatedTcpSocket) and not under_torchrun():
            _LISTENER.address, _LISTENER.proxy = address.address, proxy
        return dist.TCPStore(
            local.PROXY_HOST,
            local.port,
            size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=local.listener.detach(),
        )
    proxy = LoopbackProxy(address.connect)
    proxy.preconnect(timeout.total_seconds())
    return dist.TCPStore("127.0.0.1", proxy.port, size, is_master=False, timeout=timeout)


def hosts_port() -> int:
    """Return, on rank 0, the rendezvous' port number if all hosts use the same number, otherwise 0.

    Under torchrun the rendezvous has a free port of rank 0's host. On one host, or on loopback, it has no such port.
    """
    return _LISTENER.address[1]


def hand_over(address: tuple[str, int]) -> None:
    """If the rendezvous listens at ``address``, stop listening and leave it to rank 0's endpoint.

    The endpoint accepts without Python's interpreter lock, and passes connections for the rendezvous on.
    """
    if _LISTENER.proxy is not None and _LISTENER.address == address:
        _LISTENER.proxy.leave_port()


def job_socket(rank: int, timeout: timedelta) -> AuthenticatedSocket:
    """Create the authenticated socket of the job in the launcher's environment; on rank 0 it listens."""
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if on_one_host():
        # The name contains run and attempt. So neither a stopped process of an earlier attempt nor another supervised
        # run with the same port can hold it.
        run, attempt = os.environ.get(RUN, f"{master}-{port}"), os.environ.get("WEFT_ATTEMPT", "0")
        return AuthenticatedUnixSocket(f"weft-{os.getuid()}-ranks-{run}-{attempt}", listens=rank == 0)
    if not under_torchrun():
        return AuthenticatedTcpSocket((own_address(), port) if rank == 0 else (master, port), listens=rank == 0)
    # torchrun's agent has its store at that port. It only publishes the address of our socket. An unauthenticated peer
    # that answers in its place cannot prove the key.
    agent = dist.TCPStore(master, port, is_master=False, timeout=timeout)
    key = f"{_ADDRESS_KEY}/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    if rank == 0:
        listening = AuthenticatedTcpSocket((own_address(), 0), listens=True)
        agent.set(key, "{} {}".format(*listening.address))
        return listening
    host, _, number = agent.get(key).decode().partition(" ")
    return AuthenticatedTcpSocket((host, int(number)), listens=False)


def under_torchrun() -> bool:
    """True if torchrun's agent has a store at the master's port."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def on_one_host() -> bool:
    """True if all ranks are on this host, by the launcher's variables or because the master's address is loopback."""
    local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return os.environ["WORLD_SIZE"] in ("1", local_size) or is_loopback(os.environ["MASTER_ADDR"])


def own_address() -> str:
    """Return the address of this host on its route to rank 0. Raise ValueError if MASTER_ADDR cannot be resolved."""
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return address_towards(master, port)
    except OSError as error:
        raise ValueError(f"MASTER_ADDR={master}: {error.strerror}; set cluster.master_addr to rank 0's host") from error


def _choose_interface(address: AuthenticatedSocket) -> None:
    """Make gloo (and NCCL on a single host) listen on the ranks' interface instead of the host name's."""
    if isinstance(address, AuthenticatedUnixSocket):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return
    mine = own_address()
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == mine for entry in entries):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
