"""Opening a rank's endpoint by the configuration of its job, and waiting until its links are connected."""

from __future__ import annotations

import socket
from time import monotonic, sleep

import psutil
import torch

from weft.comm import rendezvous
from weft.comm.channel import ChannelError
from weft.comm.key import WanKey
from weft.comm.wan.endpoint import WanEndpoint
from weft.conf.schema import CommConfig


def open_endpoint(
    comm: CommConfig,
    *,
    rank: int,
    job: str,
    connections: int,
    port: int = 0,
    host_address: tuple[str, int] | None = None,
    shares_port: bool,
    device: torch.device,
) -> WanEndpoint:
    """Open an endpoint on ``comm.interface``. See `WanEndpoint` for the arguments.

    Raises:
        ValueError: there is no key, the interface does not exist, or the address cannot be bound.
    """
    return WanEndpoint(
        rank=rank,
        job=job,
        bind=listening_address(comm.interface),
        port=port,
        host_address=host_address,
        shares_port=shares_port,
        key=WanKey.from_environment(),
        connections=connections,
        deadline_s=comm.deadline_s,
        timeout_s=comm.timeout_s,
        tls=comm.tls,
        chunk_bytes=comm.chunk_kb << 10,
        device=device,
    )


def await_links(endpoint: WanEndpoint, deadline_s: float) -> None:
    """Wait until all links of ``endpoint`` are connected.

    Raises:
        ChannelError: a link is not connected within ``deadline_s``.
    """
    limit = monotonic() + deadline_s
    for peer, name in endpoint.peers.items():
        while not endpoint.counters(peer).ready:
            if monotonic() > limit:
                raise ChannelError(
                    f"link {name}: no contact within comm.deadline_s={deadline_s:g}; check that other sites can reach "
                    "comm.interface and that WEFT_KEY is the same everywhere"
                )
            sleep(0.01)


def listening_address(interface: str) -> str:
    """Return this host's address on ``interface``. If it is empty, the address on the route to rank 0.

    Raises:
        ValueError: the interface does not exist.
    """
    if not interface:
        return rendezvous.own_address()
    found = psutil.net_if_addrs()
    for entry in found.get(interface, ()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            return entry.address.partition("%")[0]
    raise ValueError(f"comm.interface={interface}: {socket.gethostname()} has {', '.join(found)}; choose one")
