"""Link probing: round trip, throughput of one connection, and how many connections saturate the link."""

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
from weft.comm.links import TOLERANCE, LinkProfile, fewest
from weft.comm.wan.endpoint import SINK_LANE, WanEndpoint
from weft.conf.host.measurements import Measurements

MOST = 32
"""Default for the maximum number of connections that a probe tries."""

_MESSAGE_BYTES = 1 << 18
_WINDOW_MESSAGES = 16  # more than the window of one connection
_REPORT_BYTES = 4096
_OPPOSED_TIME_FACTOR = 4.0  # factor on the time until both directions' pacing has converged


def search(measure: Callable[[int], float], *, most: int) -> dict[int, float]:
    """Measure rates by number of connections: double the number until two steps gain nothing, then bisect.

    Args:
        measure: returns the bits per second of a number of connections.
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
    """Measure the direction from ``endpoint`` to ``peer``; the peer only needs an endpoint.

    Afterwards the link uses the best number of connections.

    Args:
        most: the maximum number of connections to try; the link must have been opened with at
            least as many.
        seconds: duration of each measurement, and of the warm-up before it.
        message_bytes: size of the probe's messages. 16 of them should exceed a connection's window.

    Raises:
        ChannelError: the link failed.
    """
    meter = _Meter(endpoint, peer, most=most, seconds=seconds, message_bytes=message_bytes)
    rates = search(meter.rate_bps, most=min(most, endpoint.counters(peer).ready))
    profile = LinkProfile(rtt_s=endpoint.counters(peer).rtt_s, rates_bps=tuple(rates.items()))
    endpoint.use(peer, profile.connections)
    return profile


class _Meter:
    """Saturates a link and measures the acknowledged bytes."""

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
        self._channel.send("first", self._block).wait()  # the link is connected
        limit = monotonic() + 5.0
        while not endpoint.counters(peer).rtt_s and monotonic() < limit:
            sleep(0.01)

    def rate_bps(self, connections: int, *, time_factor: float = 1.0) -> float:
        """Return the steady-state rate of ``connections``, measured ``time_factor`` times as long as usual."""
        self._endpoint.use(self._peer, connections)
        rtt_s = self._endpoint.counters(self._peer).rtt_s
        # Twice the bandwidth-delay product if this measurement doubles the best rate; at least one window.
        in_flight = max(_WINDOW_MESSAGES, 4 * self._best_bps / 8 * rtt_s / self._block.nbytes) + connections
        handles = deque(self._send() for _ in range(int(in_flight)))
        self._keep_busy(handles, time_factor * max(self._seconds, 10 * rtt_s))
        start, before = monotonic(), self._endpoint.counters(self._peer).sent_bytes
        self._keep_busy(handles, time_factor * self._seconds)
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
    """Measure each direction alone, then both at once. Both ends call this, exactly one of them with ``first``.

    Args:
        connections: number to use for both directions and afterwards; 0 takes the fewest that saturate the direction to
            ``peer``.
        most, seconds, message_bytes: see `probe`.

    Returns:
        The profiles of the directions to ``peer`` and from it.

    Raises:
        ChannelError: the link failed.
    """
    effort: dict[str, Any] = {"most": most, "seconds": seconds, "message_bytes": message_bytes}
    theirs = _expect_profile(endpoint, peer)
    if not first:
        theirs.wait()
    mine = probe(endpoint, peer, **effort)
    _send_profile(endpoint, peer, mine)
    theirs.wait()  # synchronises both ends, up to the latency of a message
    theirs = _expect_profile(endpoint, peer)
    meter = _Meter(endpoint, peer, best_bps=mine.aggregate_bps, **effort)
    connections = connections or mine.connections
    mine = replace(mine, opposed_bps=meter.rate_bps(connections, time_factor=_OPPOSED_TIME_FACTOR))
    endpoint.use(peer, connections)
    _send_profile(endpoint, peer, mine)
    return mine, _profile(json.loads(bytes(theirs.wait().tolist())))


def _expect_profile(endpoint: WanEndpoint, peer: int) -> Handle:
    return endpoint.channel(peer).recv("profile", TensorSpec((_REPORT_BYTES,), torch.uint8))


def _send_profile(endpoint: WanEndpoint, peer: int, profile: LinkProfile) -> None:
    text = json.dumps(asdict(profile)).encode().ljust(_REPORT_BYTES)
    endpoint.channel(peer).send("profile", torch.frombuffer(bytearray(text), dtype=torch.uint8)).wait()


def _profile(raw: Mapping) -> LinkProfile:
    rates = tuple((int(n), float(rate)) for n, rate in raw["rates_bps"])
    return LinkProfile(rtt_s=float(raw["rtt_s"]), rates_bps=rates, opposed_bps=float(raw["opposed_bps"]))


@dataclass(frozen=True)
class ProfileCache:
    """A file cache of the link profiles of one topology; several processes may write it."""

    path: Path

    def read(self) -> dict[str, LinkProfile]:
        """Return all current profiles by link name, empty if the file is unreadable. Outdated profiles are left out."""
        known = Measurements(self.path).read()
        try:
            return {name: _profile(found.value) for name, found in known.items() if not found.is_due}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}

    def add(self, profiles: Mapping[str, LinkProfile]) -> None:
        """Add newly measured profiles."""
        Measurements(self.path).store({name: asdict(profile) for name, profile in profiles.items()})
