"""An endpoint: one rank's place on the WAN, with channels to its peers."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from weft.comm.wan.channel import WanChannel
from weft.comm.wan.key import WanKey
from weft.comm.wan.staging import staging
from weft.comm.wan.transport import LinkCounters, Path, Transport

SINK_LANE = 0xFFFF
"""A lane whose messages the peer acknowledges and throws away, for probes; nobody receives on it."""


class WanEndpoint:
    """One rank's place on the WAN.

    It listens on one address, for peers that prove to have the same key. Between two ranks
    lies a link of many connections, opened by one of the two. A thread outside Python's lock
    moves the bytes. A forked child has no part in it: its copies of the sockets are closed when
    it begins, all it may do is close, and it may have endpoints of its own.
    """

    def __init__(
        self,
        *,
        rank: int,
        bind: str,
        key: WanKey,
        job: str = "",
        port: int = 0,
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
            rank: this rank, by which peers know it.
            bind: IP address to listen on; all addresses at once (0.0.0.0) are refused.
            job: name of this attempt of the run, the same on every rank: what is left of another one
                has the same key, and is turned away.
            port: 0 takes a free one; see `address`.
            connections: TCP connections per link that this side opens; a probe tells how many.
            deadline_s: seconds of silence after which a link has failed.
            timeout_s: seconds that a transfer may wait for a living peer, or for its first contact.
            tls: encrypt with TLS 1.3, keyed by ``key``; both sides must agree. Without it tensors and
                tags are readable on the way.
            chunk_bytes: messages are cut into chunks of this size.
            buffer_bytes: memory per lane for what arrives before its receive is posted.
            congestion: the kernel's congestion control (cubic, bbr); empty leaves its default.
            device: where received tensors shall be; default: the CPU.

        Raises:
            ValueError: an argument is out of bounds, or the address cannot be listened on.
        """
        _check(bind, connections, deadline_s, timeout_s, chunk_bytes, buffer_bytes)
        self.rank = rank
        self._connections, self._timeout_s, self._buffer_bytes = connections, timeout_s, buffer_bytes
        self._staging = staging(device or torch.device("cpu"))
        self._links: dict[int, str] = {}
        self._lanes: set[Path] = set()
        self._transport = Transport(
            rank=rank,
            bind=bind,
            port=port,
            key=key,
            job=job,
            tls=tls,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
            chunk_bytes=chunk_bytes,
            congestion=congestion,
        )
        self.address = (bind, self._transport.port)

    def __enter__(self) -> WanEndpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(linger_s=5.0 if kind is None else 0.0)

    def link(self, peer: int, *, address: tuple[str, int] | None = None, connections: int = 0) -> None:
        """Make the link to ``peer``; exactly one of the two sides gives the other's ``address``.

        That side opens the connections, and opens them again when they break.

        Args:
            connections: how many; 0 takes the endpoint's.
        """
        where = f" ({address[0]}:{address[1]})" if address else ""
        name = f"rank {self.rank} - rank {peer}{where}"
        self._transport.link(peer, name, address, connections or self._connections)
        self._links[peer] = name

    @property
    def peers(self) -> Mapping[int, str]:
        """Names of the links, by peer."""
        return self._links

    def linked(self, peer: int) -> bool:
        """Whether `link` was called for ``peer``."""
        return peer in self._links

    def channel(self, peer: int, *, lane: int = 0) -> WanChannel:
        """The channel to ``peer`` over its link; see `weft.comm.channel.Channel`.

        Args:
            lane: lanes are channels that do not wait for each other; both ends name the same,
                from 0 to 65534.
        """
        path = Path(peer, lane)
        return self.channel_over(outward=[path], inward=[path])

    def channel_over(
        self,
        *,
        outward: Sequence[Path],
        inward: Sequence[Path],
        piece_bytes: int = 1 << 20,
        turns: Mapping[str, int] | None = None,
    ) -> WanChannel:
        """A channel over several paths; see `WanChannel` for the arguments."""
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
            turns={} if turns is None else turns,
        )

    def relay(self, source: Path, target: Path) -> None:
        """Send on to ``target`` whatever comes from ``source``, without this rank's doing."""
        self._check_peer(source.peer)
        self._check_peer(target.peer)
        self._transport.relay(source, target, self._buffer_bytes)

    def use(self, peer: int, connections: int) -> None:
        """Send over the first ``connections`` of the link only; the others stand by."""
        self._transport.use(peer, connections)

    def counters(self, peer: int) -> LinkCounters:
        """What the link to ``peer`` has carried so far."""
        return self._transport.counters(peer)

    @property
    def refused(self) -> int:
        """Unauthenticated connections that were refused."""
        return self._transport.refused

    def close(self, *, linger_s: float = 5.0) -> None:
        """Send what is left, for at most ``linger_s``; say goodbye to the peers; stop listening.

        A rank of a DP-cell relays for others: the cell closes together, after a barrier.
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
