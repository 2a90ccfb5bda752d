"""A WAN in a box: network namespaces as nodes, joined by a userspace line with rate and delay."""

from weft.tools.netbed.bed import NetBed, missing
from weft.tools.netbed.job import Job
from weft.tools.netbed.topology import Link, Node, Topology, load

__all__ = ["Job", "Link", "NetBed", "Node", "Topology", "load", "missing"]
