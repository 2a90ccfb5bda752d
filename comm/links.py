"""Links between sites, for plans and engines: which ranks share them, what a probe measured, and the channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from weft.conf.schema import CommConfig

TOLERANCE = 0.05
"""Relative gain below which more connections are not used."""
_MAX_PIPELINES = 64
Hop = tuple[int, int]
"""Sender and receiver, as global ranks."""


@dataclass(frozen=True)
class Sites:
    """The sites of a job over several sites. An option of the default process group.

    Attributes:
        of_ranks: the site of each global rank.
        reduce: True if replicas at different sites reduce gradients and gather weights.
    """

    of_ranks: tuple[int, ...]
    comm: CommConfig
    reduce: bool = False


@dataclass(frozen=True)
class Cell:
    """The ranks of a DP-cell at one crossing of the WAN.

    Attributes:
        near: the ranks at one side, one per pipeline, by LocalDPRank.
        far: the ranks at the other side, likewise.
        number: distinguishes cells that share ranks.
    """

    near: tuple[int, ...]
    far: tuple[int, ...]
    number: int = 0

    def __post_init__(self) -> None:
        ranks = [*self.near, *self.far]
        if len(self.near) != len(self.far) or not 1 <= len(self.near) <= _MAX_PIPELINES:
            raise ValueError(
                f"a DP-cell needs as many ranks on both sides, 1 to {_MAX_PIPELINES}; got {self.near} and {self.far}"
            )
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"a DP-cell names every rank once; got {self.near} and {self.far}")
        if not 0 <= self.number < 300:
            raise ValueError(f"number={self.number} of a DP-cell: take 0 to 299")

    def links(self, rank: int) -> list[int]:
        """Return the peers that ``rank`` needs links to: its counterpart, and the cell's other ranks at its site."""
        mine, other, local = self.sides(rank)
        return [other[local], *(peer for peer in mine if peer != rank)]

    def sides(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the ranks of the side of ``rank``, those of the other side, and its LocalDPRank.

        Raises ValueError if the rank is not in the cell.
        """
        for mine, other in ((self.near, self.far), (self.far, self.near)):
            if rank in mine:
                return mine, other, mine.index(rank)
        raise ValueError(f"rank {rank} is not in the DP-cell {self.near} - {self.far}")

    def lane(self, hop: int, local: int) -> int:
        """Return the number of the lane for a relayed slice on one of its three hops."""
        return 1 + (3 * self.number + hop) * _MAX_PIPELINES + local


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """The measured properties of one direction of a link.

    Attributes:
        rtt_s: minimum round-trip time.
        rates_bps: pairs of (number of connections, their total payload bits per second).
        opposed_bps: payload rate while the other direction was saturated too, so that acknowledgements shared the link
            with payload; 0 if only one direction was measured.
    """

    rtt_s: float
    rates_bps: tuple[tuple[int, float], ...]
    opposed_bps: float = 0.0

    @property
    def latency_s(self) -> float:
        """One-way delay: half the round trip."""
        return self.rtt_s / 2

    @property
    def single_bps(self) -> float:
        """Rate of one connection."""
        return dict(self.rates_bps)[1]

    @property
    def aggregate_bps(self) -> float:
        """The maximum rate over all numbers of connections."""
        return max(dict(self.rates_bps).values())

    @property
    def training_bps(self) -> float:
        """The rate for training, in which activations and gradients travel in opposite directions."""
        return self.opposed_bps or self.aggregate_bps

    @property
    def connections(self) -> int:
        """The fewest connections that saturate the link, within `TOLERANCE` (Atlas 4.1)."""
        return fewest(dict(self.rates_bps))


def fewest(rates_bps: Mapping[int, float]) -> int:
    """Return the smallest number of connections whose rate no larger number exceeds by more than `TOLERANCE`."""
    return min(
        count
        for count, rate in rates_bps.items()
        if all(more <= rate * (1 + TOLERANCE) for other, more in rates_bps.items() if other > count)
    )


@dataclass(frozen=True)
class LinkCounters:
    """Counters of a link.

    Attributes:
        sent_bytes: acknowledged payload.
        received_bytes: payload of complete chunks.
        resent_chunks: chunks resent because their connection broke.
        duplicate_chunks: received chunks that were dropped as duplicates.
        broken: connections lost or replaced.
        ready: connections in use.
        rtt_s: minimum round-trip time of the link's pings, or 0 before the first.
        busy_s: seconds with unacknowledged payload, less one round trip for each such period, so that bytes over these
            seconds are the link's rate.
        queued_bytes: payload of messages that is not acknowledged yet, unsent or in flight.
        retransmissions: TCP segments that the kernel has sent again.
    """

    sent_bytes: int
    received_bytes: int
    resent_chunks: int
    duplicate_chunks: int
    broken: int
    ready: int
    rtt_s: float
    busy_s: float = 0.0
    queued_bytes: int = 0
    retransmissions: int = 0


class SiteEndpoint(Protocol):
    """A rank's end of its links to other sites, and to the ranks of its DP-cells."""

    @property
    def peers(self) -> Mapping[int, str]:
        """The names of the links, by peer."""
        ...

    def counters(self, peer: int) -> LinkCounters:
        """Return the counters of the link to ``peer``."""
        ...


class SiteNetwork(Protocol):
    """A rank's part of the job's WAN."""

    priorities: dict[str, int]
    """By tag, the priority of this rank's sends among the transfers of its DP-cell; set from the schedule."""

    @property
    def endpoint(self) -> SiteEndpoint | None:
        """This rank's end of its links, or None without a neighbour at another site."""
        ...

    @property
    def channels(self) -> Mapping[Hop, Any]:
        """The channel of each hop (sender, receiver) of this rank."""
        ...

    @property
    def profiles(self) -> Mapping[Hop, LinkProfile]:
        """All ranks' probe results, by hop, or empty if nothing was probed."""
        ...

    def close(self) -> None:
        """Close all links. A collective call, because ranks relay for each other."""
        ...

    def abandon(self) -> None:
        """Close this rank's ends of all links without collective calls; some peers may be gone."""
        ...
