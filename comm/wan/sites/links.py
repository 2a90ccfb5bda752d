"""A rank's links to ranks of other sites for process groups, opened when a group needs them."""

from __future__ import annotations

import json
import os
import secrets
import weakref
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.comm import rendezvous
from weft.comm.channel import ChannelError
from weft.comm.host_port import claim
from weft.comm.links import Sites
from weft.comm.wan.channel import WanChannel
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.opening import await_links, listening_address, open_endpoint
from weft.conf.hosts import is_loopback
from weft.conf.schema import CommConfig

_CONNECTIONS = 2
"""Connections of a link for small messages of groups: one may have to be replaced."""
_REDUCING = 16
"""Connections of a link over which replicas reduce gradients, unless ``comm.connections`` is set."""
_LINGER_S = 5.0


class SiteLinks:
    """The endpoint of a rank for process groups. Its address is in the job's store.

    The store is read when a link is created, and never afterwards.
    """

    def __init__(self, store: dist.Store, sites: Sites, *, rank: int) -> None:
        """Open the endpoint. A collective call: rank 0 names the attempt, and a host's first rank listens for the host.

        Raises:
            ValueError: on all ranks of the host: there is no key, the interface does not exist, or the port is in use.
        """
        comm = sites.comm
        self.sites, self._store, self._rank = sites, store, rank
        self._held = ExitStack()
        if rank == 0:
            store.set("attempt", secrets.token_hex(16))
            store.set("port", str(rendezvous.hosts_port()))
        self._endpoint = self._listen(comm)
        store.set(f"address/{rank}", json.dumps(self._endpoint.address))
        self._closer = weakref.finalize(self, _close, self._endpoint, self._held, _LINGER_S)

    def _listen(self, comm: CommConfig) -> WanEndpoint:
        bind = listening_address(comm.interface)
        if int(os.environ.get("LOCAL_RANK", "0")):
            said = json.loads(self._store.get(f"host_address/{bind}"))
            if isinstance(said, str):
                raise ValueError(said)
            return self._open(comm, host_address=(said[0], said[1]))
        try:
            endpoint = self._listen_for_host(comm, bind)
        except ValueError as error:
            self._held.close()
            self._store.set(f"host_address/{bind}", json.dumps(str(error)))
            raise
        self._store.set(f"host_address/{bind}", json.dumps(endpoint.address))
        if self._rank == 0:
            rendezvous.hand_over(endpoint.address)
        return endpoint

    def _listen_for_host(self, comm: CommConfig, bind: str) -> WanEndpoint:
        """Listen for all ranks of this host, at a port that belongs to this run only."""
        port = comm.port or (0 if is_loopback(bind) else int(self._store.get("port")))
        if not port:
            return self._open(comm)
        remedy = f"end what does, or set another {'comm.port' if comm.port else 'cluster.master_port'}"
        try:
            self._held.enter_context(claim(port, f"endpoint-{bind}"))
        except OSError as error:
            raise ValueError(f"another run's ranks listen at {bind}:{port} of this host; {remedy}") from error
        try:
            return self._open(comm, port=port)
        except ValueError as error:
            if "cannot listen" not in str(error):
                raise
            raise ValueError(f"{error}; {remedy}") from error

    def _open(self, comm: CommConfig, *, port: int = 0, host_address: tuple[str, int] | None = None) -> WanEndpoint:
        return open_endpoint(
            comm,
            rank=self._rank,
            job=f"groups of {self._store.get('attempt').decode()}",
            connections=(comm.connections or _REDUCING) if self.sites.reduce else _CONNECTIONS,
            port=port,
            host_address=host_address,
            shares_port=True,
            device=torch.device("cpu"),
        )

    @property
    def address(self) -> tuple[str, int]:
        """The address on which this rank's host listens."""
        return self._endpoint.address

    def channel(self, peer: int, lane: int, timeout: timedelta) -> WanChannel:
        """Return the channel to ``peer`` on a lane of the only link between the two ranks. Both ranks call this.

        Raises:
            ChannelError: the store has no address for the peer.
        """
        if not self._endpoint.linked(peer):
            self._endpoint.link(peer, address=self._address(peer) if self._rank < peer else None)
        return replace(self._endpoint.channel(peer, lane=lane), timeout_s=timeout.total_seconds())

    def lane(self, store: dist.Store, *, first: bool) -> int:
        """Return the number of the lane that a group uses on all links between its members.

        Args:
            store: a store that only the group uses.
            first: True if this rank is the group's first member, which reserves a lane.
        """
        if first:
            store.set("lane", str(self._store.add("lanes", 1)))
        return int(store.get("lane"))

    def await_contact(self) -> None:
        """Wait until all links are connected. For errors see `await_links`."""
        await_links(self._endpoint, self.sites.comm.deadline_s)

    def close(self, *, linger_s: float = _LINGER_S) -> None:
        """Send queued data, for at most ``linger_s``, and stop listening.

        A host's first rank listens for the whole host, so the job must end with a barrier, as torch requires for the
        store on rank 0.
        """
        if self._closer.detach():
            _close(self._endpoint, self._held, linger_s)

    def _address(self, peer: int) -> tuple[str, int]:
        try:
            host, port = json.loads(self._store.get(f"address/{peer}"))
        except (RuntimeError, ValueError) as error:
            raise ChannelError(f"rank {peer} of another site has not published its address: {error}") from error
        return host, port


def _close(endpoint: WanEndpoint, held: ExitStack, linger_s: float) -> None:
    endpoint.close(linger_s=linger_s)
    held.close()
