"""Temporal bandwidth sharing: a DP-cell's pipelines lend each other their WAN uplinks (Atlas 4.3, 4.4).

In a cell of C pipelines, a rank that sends over the WAN hands one slice of its tensor to each of
its peers at the site. Each peer sends its slice over its own uplink to its counterpart at the
other site, which hands it to the receiver. So a tensor crosses at the rate of C uplinks. Each
uplink serves the cell's transfers by priority, set by the schedule, so that they follow each other
instead of sharing bandwidth; an uplink without data of the most urgent transfer sends other data (work-conserving).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from weft.comm.links import Cell
from weft.comm.wan.channel import WanChannel
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.transport import Path


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
