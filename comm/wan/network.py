"""The WAN of a running job: each rank's links to other sites, probed where asked, and the channels over them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from weft.comm.agreement import attempt
from weft.comm.channel import ChannelError
from weft.comm.exchange import gather
from weft.comm.wan.cell import Cell, join
from weft.comm.wan.channel import WanChannel
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.key import WanKey
from weft.comm.wan.probe import MOST, LinkProfile, probe_both
from weft.conf.schema import CommConfig

_log = logging.getLogger(__name__)
_READABLE = (
    "comm.tls=false: hidden states, their gradients and the schedule's tags travel readable between sites, and who can "
    "rewrite TCP streams on the way can alter them; set comm.tls=true unless the links are private"
)
_INSIDE_CONNECTIONS = 2  # between the relays of one site, whose network is fast

Hop = tuple[int, int]
T = TypeVar("T")


class WanNetwork:
    """What a rank holds of the job's WAN.

    Attributes:
        channels: for each hop (sender, receiver) that touches this rank, its channel.
        turns: by tag of what this rank sends, its turn among the transfers of its DP-cell;
            whoever has the schedule fills it in.
        profiles: what the probes of all ranks found, by hop; empty where none was asked for.
    """

    def __init__(self, endpoint: WanEndpoint | None) -> None:
        """Made by `join`; a rank with no neighbour at another site has no endpoint."""
        self.endpoint = endpoint
        self.channels: dict[Hop, WanChannel] = {}
        self.turns: dict[str, int] = {}
        self.profiles: dict[Hop, LinkProfile] = {}

    @classmethod
    def join(cls, cells: Sequence[Cell], *, comm: CommConfig, device: torch.device) -> WanNetwork:
        """Open the links of every cell; a collective call over the whole world.

        Args:
            cells: every crossing of the job, the same on every rank; pipelines that share
                nothing are cells of one.

        Raises:
            ChannelError: on every rank: a link could not be opened, or a probe failed.
            ValueError: on every rank: no key, or an interface that is not there.
        """
        me = dist.get_rank()
        mine = [cell for cell in cells if me in (*cell.near, *cell.far)]
        if cells and me == 0 and not comm.tls:
            _log.warning(_READABLE)
        attempt = gather(secrets.token_hex(16))[0]  # rank 0's
        endpoint = _agreed(lambda: _listen(me, attempt, comm, device) if mine else None)
        addresses = gather(endpoint.address if endpoint else None)
        network = cls(endpoint)
        for cell in mine:
            network._open(cell, addresses, comm)
        _agreed(lambda: network._await_contact(comm.deadline_s))
        if not comm.connections:
            found = _agreed(lambda: network._probe(mine))
            network.profiles = {
                hop: profile for profiles in gather(found, kinds=(LinkProfile,)) for hop, profile in profiles.items()
            }
        return network

    def close(self) -> None:
        """Say goodbye to the peers; a collective call, for a rank relays until nobody needs it."""
        dist.barrier()
        if self.endpoint is not None:
            self.endpoint.close()

    def _open(self, cell: Cell, addresses: Sequence[tuple[str, int] | None], comm: CommConfig) -> None:
        assert self.endpoint is not None
        me = self.endpoint.rank
        opposite, *others = cell.links(me)
        for peer in (opposite, *others):
            if not self.endpoint.linked(peer):
                connections = (comm.connections or MOST) if peer == opposite else _INSIDE_CONNECTIONS
                address = addresses[peer] if me < peer else None
                self.endpoint.link(peer, address=address, connections=connections)
        channel = join(self.endpoint, cell, turns=self.turns)
        self.channels |= {(me, opposite): channel, (opposite, me): channel}

    def _await_contact(self, deadline_s: float) -> None:
        if self.endpoint is None:
            return
        limit = monotonic() + deadline_s
        for peer in self.endpoint.peers:
            while not self.endpoint.counters(peer).ready:
                if monotonic() > limit:
                    raise ChannelError(
                        f"link {self.endpoint.peers[peer]}: no contact within comm.deadline_s={deadline_s:g}; "
                        "is comm.interface the one that other sites reach, and WEFT_KEY the same everywhere?"
                    )
                sleep(0.01)

    def _probe(self, cells: Sequence[Cell]) -> dict[Hop, LinkProfile]:
        """The profiles of the hops that leave this rank."""
        found: dict[Hop, LinkProfile] = {}
        if self.endpoint is not None:
            me = self.endpoint.rank
            for peer in sorted({cell.links(me)[0] for cell in cells}, key=lambda peer: sorted((me, peer))):
                found[me, peer], _ = probe_both(self.endpoint, peer, first=me < peer)
        return found


def _listen(rank: int, attempt: str, comm: CommConfig, device: torch.device) -> WanEndpoint:
    return WanEndpoint(
        rank=rank,
        job=attempt,
        bind=_address(comm.interface),
        key=WanKey.from_environment(),
        connections=comm.connections or MOST,
        deadline_s=comm.deadline_s,
        timeout_s=comm.timeout_s,
        tls=comm.tls,
        chunk_bytes=comm.chunk_kb << 10,
        device=device,
    )


def _address(interface: str) -> str:
    """This host's address on ``interface``, or on the one that reaches the job's first rank."""
    if interface:
        found = psutil.net_if_addrs()
        for entry in found.get(interface, ()):
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                return entry.address.partition("%")[0]
        raise ValueError(f"comm.interface={interface}: {socket.gethostname()} has {', '.join(found)}; choose one")
    family, kind, *_, master = socket.getaddrinfo(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as way:
        way.connect(master)  # sends nothing: it only asks for the route
        return way.getsockname()[0]


def _agreed(action: Callable[[], T]) -> T:
    """What ``action`` returns; where it fails on any rank, every rank raises the first such rank's error."""
    outcome = attempt(action, catch=(ValueError, ChannelError))
    if (failure := outcome.failure) is not None:
        raise (ChannelError if failure.kind == ChannelError.__name__ else ValueError)(failure.text) from failure.cause
    return outcome.results[0]
