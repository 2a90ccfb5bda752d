"""Temporal bandwidth sharing: a DP-cell's pipelines lend each other their WAN uplinks (Atlas 4.3, 4.4).

In a cell of C pipelines, a rank that sends over the WAN hands one slice of its tensor to each of
its peers at the site. Each peer sends its slice over its own uplink to its counterpart at the
other site, which hands it to the receiver. So a tensor crosses at the rate of C uplinks. Each
uplink serves the cell's transfers by priority, set by the schedule, so that they follow each other
instead of sharing bandwidth; an uplink without data of the most urgent one sends other data
(work-conserving).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from weft.comm.wan.channel import WanChannel
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.transport import Path

_MAX_PIPELINES = 64


class _Hop(IntEnum):
    """The three hops of a relayed slice; each has lanes of its own."""

    OUT = 0
    ACROSS = 1
    IN = 2


@dataclass(frozen=True)
class Cell:
    """The ranks of a DP-cell at one crossing of the WAN.

    Attributes:
        near: the rank of each pipeline at one side, by LocalDPRank.
        far: the same at the other side.
        number: distinguishes cells that share ranks.
    """

    near: tuple[int, ...]
    far: tuple[int, ...]
    number: int = 0

    def __post_init__(self) -> None:
        """Validate."""
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
        """The peers that ``rank`` needs links to: its counterpart, and the cell's other ranks at its site."""
        mine, other, local = self._position(rank)
        return [other[local], *(peer for peer in mine if peer != rank)]

    def _position(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The ranks of its side and of the other side, and its LocalDPRank."""
        for mine, other in ((self.near, self.far), (self.far, self.near)):
            if rank in mine:
                return mine, other, mine.index(rank)
        raise ValueError(f"rank {rank} is not in the DP-cell {self.near} - {self.far}")

    def _lane(self, hop: _Hop, local: int) -> int:
        return 1 + (3 * self.number + hop) * _MAX_PIPELINES + local


def join(
    endpoint: WanEndpoint, cell: Cell, *, piece_bytes: int = 1 << 20, priorities: Mapping[str, int] | None = None
) -> WanChannel:
    """Join a cell: relay for the other ranks, and return the channel to the counterpart.

    Every rank of the cell calls this after opening the links that `Cell.links` names. The native
    transport relays, independently of the rank's Python threads.

    Args:
        piece_bytes: a relay forwards a piece when it is complete.
        priorities: see `WanChannel`.
    """
    mine, other, local = cell._position(endpoint.rank)
    others = [index for index in range(len(mine)) if index != local]
    for index in others:
        endpoint.relay(
            Path(mine[index], cell._lane(_Hop.OUT, index)), Path(other[local], cell._lane(_Hop.ACROSS, index))
        )
        endpoint.relay(
            Path(other[local], cell._lane(_Hop.ACROSS, index)), Path(mine[index], cell._lane(_Hop.IN, local))
        )
    direct = Path(other[local], cell._lane(_Hop.ACROSS, local))
    return endpoint.channel_over(
        outward=[direct, *(Path(mine[index], cell._lane(_Hop.OUT, local)) for index in others)],
        inward=[direct, *(Path(mine[index], cell._lane(_Hop.IN, index)) for index in others)],
        piece_bytes=piece_bytes,
        priorities=priorities,
    )
