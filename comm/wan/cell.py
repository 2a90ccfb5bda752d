"""Temporal bandwidth sharing: a DP-cell's pipelines lend each other their WAN uplinks (Atlas 4.3, 4.4).

In a cell of C pipelines, the rank that sends over the WAN hands one slice of its tensor to each
of its peers at the site; every peer sends a slice over its own uplink to its opposite, and that
one hands it to the receiver. So a tensor crosses at C uplinks' rate. Each uplink serves the
cell's transfers in their turns, which the schedule gives them: they follow each other instead of
slowing each other down, and an uplink that has nothing of the next one goes on with what it has.
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
    """The three hops of a relayed slice, each on lanes of its own."""

    OUT = 0
    ACROSS = 1
    IN = 2


@dataclass(frozen=True)
class Cell:
    """The ranks of a DP-cell at one crossing of the WAN.

    Attributes:
        near: for each pipeline of the cell, by LocalDPRank, its rank at one side.
        far: for each pipeline, its rank at the other side.
        number: distinguishes cells that share ranks.
    """

    near: tuple[int, ...]
    far: tuple[int, ...]
    number: int = 0

    def __post_init__(self) -> None:
        """Refuse a cell whose sides do not match."""
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
        """The peers that ``rank`` needs links to: its opposite, and the cell's others at its site."""
        mine, other, local = self._seat(rank)
        return [other[local], *(peer for peer in mine if peer != rank)]

    def _seat(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Its side, the other side, and its LocalDPRank."""
        for mine, other in ((self.near, self.far), (self.far, self.near)):
            if rank in mine:
                return mine, other, mine.index(rank)
        raise ValueError(f"rank {rank} is not in the DP-cell {self.near} - {self.far}")

    def _lane(self, hop: _Hop, local: int) -> int:
        return 1 + (3 * self.number + hop) * _MAX_PIPELINES + local


def join(
    endpoint: WanEndpoint, cell: Cell, *, piece_bytes: int = 1 << 20, turns: Mapping[str, int] | None = None
) -> WanChannel:
    """Take a rank's place in a cell: relay for the others, and get the channel to the opposite rank.

    Every rank of the cell does so, after it has made the links that `Cell.links` names. The
    relaying is the transport's: it goes on whatever the rank's own threads do.

    Args:
        piece_bytes: a relay sends a piece on when it has all of it.
        turns: see `WanChannel`.
    """
    mine, other, local = cell._seat(endpoint.rank)
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
        turns=turns,
    )
