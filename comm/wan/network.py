"""The WAN links of a job: opens and probes each rank's links to other sites, and provides their channels."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist

from weft.comm.agreement import attempt
from weft.comm.channel import ChannelError
from weft.comm.exchange import gather
from weft.comm.links import Cell, Hop, LinkProfile
from weft.comm.wan.channel import WanChannel
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.opening import await_links, open_endpoint
from weft.comm.wan.probe import MOST, probe_both
from weft.comm.wan.transport import Path
from weft.conf.schema import CommConfig

_log = logging.getLogger(__name__)
_NO_TLS_WARNING = (
    "comm.tls=false: hidden states, gradients and tags are sent between sites unencrypted, and can be read and altered "
    "on the way; set comm.tls=true unless the links are private"
)
INSIDE_CONNECTIONS = 2
"""Connections of a link between ranks of one site."""

T = TypeVar("T")


class WanNetwork:
    """A rank's part of the job's WAN.

    Attributes:
        channels: the channel of each hop (sender, receiver) of this rank.
        priorities: by tag, the priority of this rank's sends among the transfers of its DP-cell; the
            engine fills it in from the schedule.
        profiles: all ranks' probe results, by hop, or empty if nothing was probed.
    """

    def __init__(self, endpoint: WanEndpoint | None) -> None:
        """Call `join` instead. ``endpoint`` is None on a rank without a neighbour at another site."""
        self.endpoint = endpoint
        self.channels: dict[Hop, WanChannel] = {}
        self.priorities: dict[str, int] = {}
        self.profiles: dict[Hop, LinkProfile] = {}

    @classmethod
    def join(
        cls,
        cells: Sequence[Cell],
        *,
        comm: CommConfig,
        device: torch.device,
        known: Mapping[Hop, LinkProfile] = MappingProxyType({}),
        address: tuple[str, int] | None = None,
    ) -> WanNetwork:
        """Open the links of every cell. A collective call over the whole world.

        Args:
            cells: all DP-cells of the job, the same on every rank. A pipeline that shares no uplinks is a cell of its
                own.
            address: the address on which this host already listens, if each host has one port. None makes every rank
                listen, at ports from ``comm.port`` on.
            known: all link profiles that an earlier attempt measured. If any rank has them, no link is probed.

        Raises:
            ChannelError: on every rank: a link could not be opened, or a probe failed.
            ValueError: on every rank: there is no key, or the interface does not exist.
        """
        me = dist.get_rank()
        mine = [cell for cell in cells if me in (*cell.near, *cell.far)]
        if cells and me == 0 and not comm.tls:
            _log.warning(_NO_TLS_WARNING)
        attempt = gather(secrets.token_hex(16))[0]  # rank 0's value
        port = 0 if address else comm.port and comm.port + int(os.environ.get("LOCAL_RANK", "0"))

        def listen() -> WanEndpoint:
            return open_endpoint(
                comm,
                rank=me,
                job=attempt,
                connections=comm.connections or MOST,
                port=port,
                host_address=address,
                shares_port=address is not None,
                device=device,
            )

        endpoint = _on_all_ranks(lambda: listen() if mine else None)
        addresses = gather(endpoint.address if endpoint else None)
        network = cls(endpoint)
        for cell in mine:
            network._open(cell, addresses, comm)
        _on_all_ranks(lambda: await_links(endpoint, comm.deadline_s) if endpoint else None)
        if not comm.connections:
            network.profiles = next(filter(None, gather(dict(known), kinds=(LinkProfile,))), {})
            network._use_known()
        if not comm.connections and not network.profiles:
            found = _on_all_ranks(lambda: network._probe(mine))
            network.profiles = {
                hop: profile for profiles in gather(found, kinds=(LinkProfile,)) for hop, profile in profiles.items()
            }
        return network

    def close(self) -> None:
        """Close all links. A collective call, because ranks relay for each other."""
        dist.barrier()
        if self.endpoint is not None:
            self.endpoint.close()

    def abandon(self) -> None:
        """Close this rank's ends of all links without collective calls; some peers may be gone."""
        if self.endpoint is not None:
            self.endpoint.close(linger_s=0.0)

    def _open(self, cell: Cell, addresses: Sequence[tuple[str, int] | None], comm: CommConfig) -> None:
        assert self.endpoint is not None
        me = self.endpoint.rank
        opposite, *others = cell.links(me)
        for peer in (opposite, *others):
            if not self.endpoint.linked(peer):
                connections = (comm.connections or MOST) if peer == opposite else INSIDE_CONNECTIONS
                address = addresses[peer] if me < peer else None
                self.endpoint.link(peer, address=address, connections=connections)
        channel = join(self.endpoint, cell, priorities=self.priorities)
        self.channels |= {(me, opposite): channel, (opposite, me): channel}

    def _use_known(self) -> None:
        """Set each link to the number of connections that an earlier probe found sufficient."""
        for (sender, peer), profile in self.profiles.items():
            if self.endpoint is not None and sender == self.endpoint.rank:
                self.endpoint.use(peer, profile.connections)

    def _probe(self, cells: Sequence[Cell]) -> dict[Hop, LinkProfile]:
        found: dict[Hop, LinkProfile] = {}
        if self.endpoint is not None:
            me = self.endpoint.rank
            for peer in sorted({cell.links(me)[0] for cell in cells}, key=lambda peer: sorted((me, peer))):
                found[me, peer], _ = probe_both(self.endpoint, peer, first=me < peer)
        return found


def _on_all_ranks(action: Callable[[], T]) -> T:
    """Return the result of ``action``. If it fails on any rank, all ranks raise the first failing rank's error."""
    outcome = attempt(action, catch=(ValueError, ChannelError))
    if (failure := outcome.failure) is not None:
        raise (ChannelError if failure.kind == ChannelError.__name__ else ValueError)(failure.text) from failure.cause
    return outcome.results[0]


class _Hop(IntEnum):
    """The three hops of a relayed slice. Each hop has its own lanes."""

    OUT = 0
    ACROSS = 1
    IN = 2


def join(
    endpoint: WanEndpoint, cell: Cell, *, piece_bytes: int = 1 << 20, priorities: Mapping[str, int] | None = None
) -> WanChannel:
    """Join a cell: relay for the other ranks, and return the channel to the counterpart.

    Every rank of the cell calls this after opening the links that `Cell.links` names. The native
    transport relays, independently of the rank's Python threads.

    Args:
        piece_bytes: size of a piece. A relay forwards a piece when it is complete.
        priorities: see `WanChannel`.
    """
    mine, other, local = cell.sides(endpoint.rank)
    others = [index for index in range(len(mine)) if index != local]
    for index in others:
        endpoint.relay(Path(mine[index], cell.lane(_Hop.OUT, index)), Path(other[local], cell.lane(_Hop.ACROSS, index)))
        endpoint.relay(Path(other[local], cell.lane(_Hop.ACROSS, index)), Path(mine[index], cell.lane(_Hop.IN, local)))
    direct = Path(other[local], cell.lane(_Hop.ACROSS, local))
    return endpoint.channel_over(
        outward=[direct, *(Path(mine[index], cell.lane(_Hop.OUT, local)) for index in others)],
        inward=[direct, *(Path(mine[index], cell.lane(_Hop.IN, index)) for index in others)],
        piece_bytes=piece_bytes,
        priorities=priorities,
    )
