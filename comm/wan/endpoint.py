"""A rank's endpoint on the WAN: links and channels to peers at other sites."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from weft.comm.key import WanKey
from weft.comm.links import LinkCounters
from weft.comm.wan.channel import WanChannel
from weft.comm.wan.staging import staging
from weft.comm.wan.transport import Path, Transport

SINK_LANE = 0xFFFF
"""A lane whose messages the peer acknowledges and discards, for probes."""


class WanEndpoint:
    """A rank's endpoint on the WAN.

    It listens on one address and accepts peers that prove the same key. A link between two ranks
    consists of many connections, all opened by one of the two. A native thread transfers the data
    without Python's interpreter lock. A forked child cannot use its parent's endpoint, except to
    close it: the sockets are closed in the child. It may create its own.
    """

    def __init__(
        self,
        *,
        rank: int,
        bind: str,
        key: WanKey,
        job: str = "",
        port: int = 0,
        host_address: tuple[str, int] | None = None,
        shares_port: bool = False,
        connections: int = 8,
        deadline_s: float = 30.0,
        timeout_s: float = 600.0,
        tls: bool = True,
        chunk_bytes: int = 128 << 10,
        buffer_bytes: int = 64 << 20,
        congestion: str = "",
        device: torch.device | None = None,
    ) -> None:
        """Listen on ``bind``.

        Args:
            rank: this rank's number, by which peers identify it.
            bind: IP address to listen on; the wildcard (0.0.0.0) is refused.
            job: identifies this attempt of the run, the same on every rank: processes that remain from another
                attempt, which have the same key, are refused.
            port: TCP port; 0 chooses a free one, which `address` contains.
            host_address: address of the host's endpoint that listens for this one, which then does not listen itself.
                Needs ``shares_port``.
            shares_port: True if endpoints of one host share a port; the same on all endpoints of the job. The endpoint
                that listens (no ``host_address``) passes connections on to the others.
            connections: TCP connections per link that this side opens; a probe finds the best number.
            deadline_s: seconds of silence after which a link fails.
            timeout_s: seconds after which a transfer on a working link fails, and a link fails that never connected.
            tls: encrypt with TLS 1.3 and a pre-shared key derived from ``key``; the same on both sides. Without
                TLS tensors and tags are sent unencrypted.
            chunk_bytes: size of the chunks that messages are split into.
            buffer_bytes: memory per lane for messages that arrive before their receive is posted.
            congestion: the kernel's congestion control (cubic, bbr); empty selects the kernel's default.
            device: device of received tensors; default: the CPU.

        Raises:
            ValueError: an argument is out of range, or the address cannot be bound.
        """
        assert shares_port or host_address is None, "an endpoint that does not listen needs shares_port=True"
        _check(bind, connections, deadline_s, timeout_s, chunk_bytes, buffer_bytes)
        self.rank = rank
        self._connections, self._timeout_s, self._buffer_bytes = connections, timeout_s, buffer_bytes
        self._staging = staging(device or torch.device("cpu"))
        self._links: dict[int, str] = {}
        self._lanes: set[Path] = set()
        self._transport = Transport(
            rank,
            key,
            job,
            shares_port=shares_port,
            host=b"" if host_address else bind.encode(),
            port=port,
            tls=tls,
            deadline_s=deadline_s,
            patience_s=timeout_s,
            chunk_bytes=chunk_bytes,
            unsent_bytes=chunk_bytes,
            congestion=congestion.encode(),
        )
        self.address = host_address or (bind, self._transport.port)

    def __enter__(self) -> WanEndpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(linger_s=5.0 if kind is None else 0.0)

    def link(self, peer: int, *, address: tuple[str, int] | None = None, connections: int = 0) -> None:
        """Create the link to ``peer``; exactly one of the two sides passes the other's ``address``.

        That side opens the connections, and reopens them when they break.

        Args:
            connections: number of connections; 0 takes the endpoint's default.
        """
        where = f" ({address[0]}:{address[1]})" if address else ""
        name = f"rank {self.rank} - rank {peer}{where}"
        self._transport.link(peer, name, address, connections or self._connections)
        self._links[peer] = name

    @property
    def peers(self) -> Mapping[int, str]:
        """The names of the links, by peer."""
        return self._links

    def linked(self, peer: int) -> bool:
        """True if there is a link to ``peer``."""
        return peer in self._links

    def channel(self, peer: int, *, lane: int = 0) -> WanChannel:
        """Return the channel to ``peer`` over its link. See `weft.comm.channel.Channel`.

        Args:
            lane: number from 0 to 65534 of an independent channel over the same link; the same at both ends.
        """
        path = Path(peer, lane)
        return self.channel_over(outward=[path], inward=[path])

    def channel_over(
        self,
        *,
        outward: Sequence[Path],
        inward: Sequence[Path],
        piece_bytes: int = 1 << 20,
        priorities: Mapping[str, int] | None = None,
    ) -> WanChannel:
        """Create a channel over several paths. See `WanChannel` for the arguments."""
        for path in (*outward, *inward):
            self._check_peer(path.peer)
        for path in set(inward) - self._lanes:
            if path.lane != SINK_LANE:
                self._transport.open_lane(path, self._buffer_bytes)
                self._lanes.add(path)
        return WanChannel(
            transport=self._transport,
            staging=self._staging,
            link=self._links[outward[0].peer],
            outward=tuple(outward),
            inward=tuple(inward),
            timeout_s=self._timeout_s,
            piece_bytes=piece_bytes,
            priorities={} if priorities is None else priorities,
        )

    def relay(self, source: Path, target: Path) -> None:
        """Forward all messages from ``source`` to ``target`` in the native thread."""
        self._check_peer(source.peer)
        self._check_peer(target.peer)
        self._transport.relay(source, target, self._buffer_bytes)

    def use(self, peer: int, connections: int) -> None:
        """Send over the first ``connections`` of the link to ``peer`` only. The others are idle."""
        self._transport.use(peer, connections)

    def counters(self, peer: int) -> LinkCounters:
        """Return the counters of the link to ``peer``."""
        return self._transport.counters(peer)

    @property
    def refused(self) -> int:
        """Number of connections that were refused."""
        return self._transport.refused

    def close(self, *, linger_s: float = 5.0) -> None:
        """Send queued data, for at most ``linger_s``, and close all links.

        Ranks of a DP-cell relay for each other, so they close together, after a barrier.
        """
        self._staging.close()
        self._transport.close(linger_s)

    def _check_peer(self, peer: int) -> None:
        if peer not in self._links:
            raise ValueError(f"rank {self.rank} has no link to rank {peer}; call link() first")


def _check(
    bind: str, connections: int, deadline_s: float, timeout_s: float, chunk_bytes: int, buffer_bytes: int
) -> None:
    try:
        address = ipaddress.ip_address(bind)
    except ValueError as error:
        raise ValueError(f"bind={bind!r}: give this host's IP address on the WAN") from error
    if address.is_unspecified:
        raise ValueError(f"bind={bind}: that opens the port on every address; give this host's address on the WAN")
    if not 1 <= connections <= 1024:
        raise ValueError(f"connections={connections}: take 1 to 1024")
    if not 0 < deadline_s <= timeout_s:
        raise ValueError(f"deadline_s={deadline_s:g}: take more than 0 and at most timeout_s={timeout_s:g}")
    if not 4 << 10 <= chunk_bytes <= 4 << 20:
        raise ValueError(f"chunk_bytes={chunk_bytes}: take 4096 to {4 << 20}")
    if buffer_bytes < chunk_bytes:
        raise ValueError(f"buffer_bytes={buffer_bytes}: must hold at least one chunk of {chunk_bytes} bytes")
