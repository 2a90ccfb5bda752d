"""The probe of a link: how far it is, what one connection carries, and how many it takes to fill it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from weft.comm.channel import Handle, TensorSpec
from weft.comm.wan.endpoint import SINK_LANE, WanEndpoint
from weft.conf.files import JsonCache

TOLERANCE = 0.05
"""More connections are not worth it for less than this share of the rate."""

MOST = 32
"""Connections that a probe tries at most, unless told."""

_MESSAGE_BYTES = 1 << 18
_WINDOW_MESSAGES = 16  # of one connection, generously
_REPORT_BYTES = 4096
_PATIENCE_OPPOSED = 4.0  # acknowledgements wait behind the other side's chunks until both have found their pace


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """One direction of a link, as a probe found it.

    Attributes:
        rtt_s: shortest round trip.
        rates_bps: pairs of connections and the payload bits per second that they carried together.
        opposed_bps: what they carried while as much came the other way, so that acknowledgements
            shared the line with payload; 0 where only one way was measured.
    """

    rtt_s: float
    rates_bps: tuple[tuple[int, float], ...]
    opposed_bps: float = 0.0

    @property
    def latency_s(self) -> float:
        """One-way delay, taken as half the round trip."""
        return self.rtt_s / 2

    @property
    def single_bps(self) -> float:
        """What one connection carried."""
        return dict(self.rates_bps)[1]

    @property
    def aggregate_bps(self) -> float:
        """The most that any number of connections carried."""
        return max(dict(self.rates_bps).values())

    @property
    def training_bps(self) -> float:
        """What a pipeline may count on: activations go one way while gradients come the other."""
        return self.opposed_bps or self.aggregate_bps

    @property
    def connections(self) -> int:
        """The fewest connections that carry what more would not exceed by `TOLERANCE` (Atlas 4.1)."""
        return fewest(dict(self.rates_bps))


def fewest(rates_bps: Mapping[int, float]) -> int:
    """The least number of connections whose rate no greater number exceeds by `TOLERANCE`."""
    return min(
        count
        for count, rate in rates_bps.items()
        if all(more <= rate * (1 + TOLERANCE) for other, more in rates_bps.items() if other > count)
    )


def search(measure: Callable[[int], float], *, most: int) -> dict[int, float]:
    """Rates by number of connections: doubling until it gains nothing twice, then halving the gap.

    Args:
        measure: bits per second of that many connections.
        most: the greatest number to try.
    """
    rates = {1: measure(1)}
    idle = 0
    while idle < 2 and max(rates) < most:
        best = max(rates.values())
        count = min(2 * max(rates), most)
        rates[count] = measure(count)
        idle = idle + 1 if rates[count] <= best * (1 + TOLERANCE) else 0
    while (high := fewest(rates)) > 1:
        low = max(count for count in rates if count < high)
        if high - low <= max(1, high // 4):
            break
        rates[(low + high) // 2] = measure((low + high) // 2)
    return dict(sorted(rates.items()))


def probe(
    endpoint: WanEndpoint, peer: int, *, most: int = MOST, seconds: float = 0.5, message_bytes: int = _MESSAGE_BYTES
) -> LinkProfile:
    """Measure the way from ``endpoint`` to ``peer``; the peer needs no more than its own endpoint.

    Afterwards the link uses the number of connections that was found.

    Args:
        most: the greatest number of connections to try; the side that opens the link's
            connections must have been given at least as many.
        seconds: time of each measurement, after as long again to settle.
        message_bytes: size of its messages; 16 should be more than a connection's window.

    Raises:
        ChannelError: the link failed.
    """
    meter = _Meter(endpoint, peer, most=most, seconds=seconds, message_bytes=message_bytes)
    rates = search(meter.rate_bps, most=min(most, endpoint.counters(peer).ready))
    profile = LinkProfile(rtt_s=endpoint.counters(peer).rtt_s, rates_bps=tuple(rates.items()))
    endpoint.use(peer, profile.connections)
    return profile


class _Meter:
    """Keeps a link busy and watches what the peer acknowledges."""

    def __init__(
        self,
        endpoint: WanEndpoint,
        peer: int,
        *,
        most: int,
        seconds: float,
        message_bytes: int,
        best_bps: float = 0.0,
    ) -> None:
        self._endpoint, self._peer, self._most, self._seconds = endpoint, peer, most, seconds
        self._channel = endpoint.channel(peer, lane=SINK_LANE)
        self._block = torch.zeros(message_bytes, dtype=torch.uint8)
        self._best_bps = best_bps
        self._channel.send("first", self._block).wait()  # there is contact
        limit = monotonic() + 5.0
        while not endpoint.counters(peer).rtt_s and monotonic() < limit:
            sleep(0.01)

    def rate_bps(self, connections: int, *, patience: float = 1.0) -> float:
        """What that many connections carry once they are up to speed, ``patience`` times as long as usual."""
        self._endpoint.use(self._peer, connections)
        rtt_s = self._endpoint.counters(self._peer).rtt_s
        # Twice what the line holds if this doubles the best rate, or a window's worth.
        in_flight = max(_WINDOW_MESSAGES, 4 * self._best_bps / 8 * rtt_s / self._block.nbytes) + connections
        handles = deque(self._send() for _ in range(int(in_flight)))
        self._keep_busy(handles, patience * max(self._seconds, 10 * rtt_s))
        start, before = monotonic(), self._endpoint.counters(self._peer).sent_bytes
        self._keep_busy(handles, patience * self._seconds)
        rate = (self._endpoint.counters(self._peer).sent_bytes - before) * 8 / (monotonic() - start)
        self._endpoint.use(self._peer, self._most)
        for handle in handles:
            handle.wait()
        self._best_bps = max(self._best_bps, rate)
        return rate

    def _send(self) -> Handle:
        return self._channel.send("probe", self._block)

    def _keep_busy(self, handles: deque[Handle], seconds: float) -> None:
        limit = monotonic() + seconds
        while monotonic() < limit:
            handles.popleft().wait()
            handles.append(self._send())


def probe_both(
    endpoint: WanEndpoint,
    peer: int,
    *,
    first: bool,
    connections: int = 0,
    most: int = MOST,
    seconds: float = 0.5,
    message_bytes: int = _MESSAGE_BYTES,
) -> tuple[LinkProfile, LinkProfile]:
    """Measure each direction alone, then both at once; both ends call it, one of them with ``first``.

    Args:
        connections: that carry both ways at once, and all that comes later; 0: the fewest that
            fill the way to ``peer``.
        most, seconds, message_bytes: as of `probe`.

    Returns:
        The way to ``peer``, and the way from it.

    Raises:
        ChannelError: the link failed.
    """
    effort: dict[str, Any] = {"most": most, "seconds": seconds, "message_bytes": message_bytes}
    theirs = _expect_profile(endpoint, peer)
    if not first:
        theirs.wait()
    mine = probe(endpoint, peer, **effort)
    _tell(endpoint, peer, mine)
    theirs.wait()  # now both are here, but for the time that a message takes
    theirs = _expect_profile(endpoint, peer)
    meter = _Meter(endpoint, peer, best_bps=mine.aggregate_bps, **effort)
    connections = connections or mine.connections
    mine = replace(mine, opposed_bps=meter.rate_bps(connections, patience=_PATIENCE_OPPOSED))
    endpoint.use(peer, connections)
    _tell(endpoint, peer, mine)
    return mine, _profile(json.loads(bytes(theirs.wait().numpy()).decode()))


def _expect_profile(endpoint: WanEndpoint, peer: int) -> Handle:
    return endpoint.channel(peer).recv("profile", TensorSpec((_REPORT_BYTES,), torch.uint8))


def _tell(endpoint: WanEndpoint, peer: int, profile: LinkProfile) -> None:
    text = json.dumps(asdict(profile)).encode().ljust(_REPORT_BYTES)
    endpoint.channel(peer).send("profile", torch.frombuffer(bytearray(text), dtype=torch.uint8)).wait()


def _profile(raw: Mapping) -> LinkProfile:
    rates = tuple((int(n), float(rate)) for n, rate in raw["rates_bps"])
    return LinkProfile(rtt_s=float(raw["rtt_s"]), rates_bps=rates, opposed_bps=float(raw["opposed_bps"]))


@dataclass(frozen=True)
class ProfileCache:
    """Profiles of one topology's links, in a file that several processes may write.

    Attributes:
        path: the file.
    """

    path: Path

    def read(self) -> dict[str, LinkProfile]:
        """All profiles by link name; empty where nothing was probed, or the file is no longer readable."""
        try:
            return {name: _profile(raw) for name, raw in JsonCache(self.path).read().items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}

    def add(self, profiles: Mapping[str, LinkProfile]) -> None:
        """Put ``profiles`` beside those that are there."""
        JsonCache(self.path).add({name: asdict(profile) for name, profile in profiles.items()})
