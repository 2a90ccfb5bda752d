"""The WAN channel: many authenticated TCP connections per pair of ranks, outside Python's lock."""

from weft.comm.wan.cell import Cell, join
from weft.comm.wan.channel import WanChannel, WanHandle
from weft.comm.wan.endpoint import SINK_LANE, WanEndpoint
from weft.comm.wan.key import WanKey
from weft.comm.wan.transport import LinkCounters, Path

__all__ = [
    "SINK_LANE",
    "Cell",
    "LinkCounters",
    "Path",
    "WanChannel",
    "WanEndpoint",
    "WanHandle",
    "WanKey",
    "join",
]
