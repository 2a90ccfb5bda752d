"""The topology of a bed: sites, their nodes, and the line between each pair of sites."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any, get_type_hints

from weft.conf.host.documents import read_yaml
from weft.conf.schema import ClusterConfig

_NAME = re.compile(r"[A-Za-z0-9_-]{1,31}")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine with one address, an uplink to the WAN and a fast network inside its site."""

    name: str
    """Name, unique in the bed."""
    site: str
    """Name of its site."""
    uplink_mbps: float = 1000.0
    """Megabits per second that it can send to other sites."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The line between two sites."""

    sites: tuple[str, ...]
    """The two sites."""
    latency_ms: float
    """One-way delay in milliseconds."""
    jitter_ms: float = 0.0
    """The delay of a packet varies by up to this much either way; packets stay in order."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A whole bed.

    A node's address is 10.77.S.H, where S counts sites from 1 and H the site's nodes from 1.
    """

    name: str = "weft"
    """Name of the bed; beds of different names can be up at once."""
    nodes: tuple[Node, ...]
    """All nodes, by site."""
    links: tuple[Link, ...] = ()
    """A link for every pair of sites."""
    mtu: int = 9000
    """Bytes of the largest packet."""
    window_kb: float = 0.0
    """Kilobytes of a connection's receive buffer, which caps its window; 0 leaves the kernel's."""
    queue_ms: float = 50.0
    """Milliseconds of traffic that an uplink holds back before it drops packets."""
    congestion: str = "cubic"
    """The kernel's congestion control for connections between sites."""

    def __post_init__(self) -> None:
        _check_names(self)
        _check_numbers(self)
        _check_links(self)

    @property
    def sites(self) -> tuple[str, ...]:
        """Site names, in the order of their first nodes."""
        return tuple(dict.fromkeys(node.site for node in self.nodes))

    def node(self, name: str) -> Node:
        """Return the node with this name; ValueError if there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ValueError(f"there is no node {name} in bed {self.name}; it has {_names(self.nodes)}")

    def address(self, name: str) -> str:
        """Return the IPv4 address of node ``name``."""
        node = self.node(name)
        peers = [other.name for other in self.nodes if other.site == node.site]
        return f"10.77.{self.sites.index(node.site) + 1}.{peers.index(name) + 1}"

    def members(self, name: str) -> list[str]:
        """Return the names of a site's nodes; for a node, its own name."""
        found = [node.name for node in self.nodes if name in (node.name, node.site)]
        if not found:
            known = ", ".join(self.sites)
            raise ValueError(f"there is no node or site {name} in bed {self.name}; sites {known}, {_names(self.nodes)}")
        return found

    @classmethod
    def even(cls, sites: Sequence[int], *, uplink_mbps: float, latency_ms: float, **more: Any) -> Topology:
        """Create sites s0, s1 and so on with ``sites[i]`` nodes each; all uplinks and all latencies are equal.

        Nodes are n0, n1 and so on, in the order of sites; ``more`` has other fields of `Topology`.
        """
        places = [f"s{site}" for site, count in enumerate(sites) for _ in range(count)]
        return cls(
            name=f"bed{os.getpid()}",
            nodes=tuple(Node(name=f"n{i}", site=site, uplink_mbps=uplink_mbps) for i, site in enumerate(places)),
            links=tuple(Link(sites=pair, latency_ms=latency_ms) for pair in combinations(dict.fromkeys(places), 2)),
            **more,
        )

    @classmethod
    def of_cluster(
        cls, cluster: ClusterConfig, *, name: str = "weft", replicas: int = 1, window_kb: float = 0.0
    ) -> Topology:
        """Return the bed for a run's ``cluster``: one node per rank or host, with the rate of each site's slowest link.

        Nodes are in the order of global ranks.

        Args:
            replicas: number of pipelines, each on its own nodes.
        """
        uplinks = {
            site.name: min((link.bandwidth_mbps for link in cluster.links if site.name in link.sites), default=0.0)
            for site in cluster.sites
        }
        nodes = tuple(
            Node(name=f"{site.name}{i}", site=site.name, uplink_mbps=uplinks[site.name] or Node.uplink_mbps)
            for site in cluster.sites
            for i in range(site.ranks * replicas or len(site.hosts))
        )
        links = tuple(Link(sites=tuple(link.sites), latency_ms=link.latency_ms) for link in cluster.links)
        return cls(name=name, nodes=nodes, links=links, window_kb=window_kb)


def load(path: Path) -> Topology:
    """Read a topology from YAML.

    ``sites`` maps a site's name to its nodes' names, or to their number. ``uplink_mbps`` is the
    rate of all nodes that ``uplinks`` does not name. Everything else is as in `Topology`:

        name: atlas
        sites: {east: [e0, e1], west: 2}
        uplink_mbps: 500
        uplinks: {e1: 100}
        links: [{sites: [east, west], latency_ms: 20}]

    Raises:
        ValueError: the topology is invalid; the message names the field.
    """
    try:
        raw = read_yaml(path, most_bytes=2**20)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path}: expected a mapping with `sites` and `links`")
    return from_mapping(raw)


def from_mapping(raw: Mapping[str, Any]) -> Topology:
    """Return a topology from the mapping that `load` describes."""
    given = dict(raw)
    sites = given.pop("sites", None)
    if not isinstance(sites, Mapping):
        raise ValueError("sites: expected a mapping from a site's name to its nodes, as in {east: [e0, e1], west: 2}")
    uplink_mbps = given.pop("uplink_mbps", Node.uplink_mbps)
    uplinks = given.pop("uplinks", {})
    nodes = tuple(
        _read(Node, {"name": node, "site": site, "uplink_mbps": uplinks.get(node, uplink_mbps)}, "sites")
        for site, listed in sites.items()
        for node in ([f"{site}{i}" for i in range(listed)] if isinstance(listed, int) else listed)
    )
    if unknown := set(uplinks) - {node.name for node in nodes}:
        raise ValueError(f"uplinks: there is no node {', '.join(sorted(unknown))}; sites has {_names(nodes)}")
    links = tuple(_read(Link, link, f"links[{i}]") for i, link in enumerate(given.pop("links", ())))
    return _read(Topology, {**given, "nodes": nodes, "links": links}, "topology")


def _read(kind: type, given: Any, where: str) -> Any:
    """Return an object of ``kind`` with numbers converted; refuse unknown fields."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}={given!r}: expected {{{', '.join(field.name for field in fields(kind))}}}")
    hints = get_type_hints(kind)
    if unknown := set(given) - set(hints):
        raise ValueError(f"{where}: there is no field {', '.join(sorted(unknown))}; it has {', '.join(hints)}")
    if absent := [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]:
        raise ValueError(f"{where}: {', '.join(absent)} must be given")
    return kind(**{name: _coerced(hints[name], value, f"{where}.{name}") for name, value in given.items()})


def _coerced(kind: Any, value: Any, where: str) -> Any:
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where}={value!r}: expected a number")
        return kind(value)
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{where}={value!r}: expected text")
    return value if kind is str else tuple(value)


def _names(nodes: tuple[Node, ...]) -> str:
    return "nodes " + ", ".join(node.name for node in nodes)


def _check_names(topology: Topology) -> None:
    names = [node.name for node in topology.nodes]
    for name in [topology.name, *names, *topology.sites]:
        if not _NAME.fullmatch(name):
            raise ValueError(f"name {name!r}: take 1 to 31 letters, digits, _ or -")
    twice = [name for name, count in Counter([*names, *topology.sites]).items() if count > 1]
    if twice:
        raise ValueError(f"name {twice[0]}: stands for two nodes or sites; rename one")
    if not 1 <= len(names) <= 64 or len(topology.sites) > 15:
        raise ValueError(f"{len(names)} nodes in {len(topology.sites)} sites: a bed holds 1 to 64 nodes in 15 sites")


def _check_numbers(topology: Topology) -> None:
    for node in topology.nodes:
        if node.uplink_mbps <= 0:
            raise ValueError(f"uplink_mbps={node.uplink_mbps:g} of node {node.name}: give a positive rate")
    if not 1280 <= topology.mtu <= 65000:
        raise ValueError(f"mtu={topology.mtu}: take 1280 to 65000 bytes")
    if topology.queue_ms <= 0 or topology.window_kb < 0:
        raise ValueError("queue_ms must be positive and window_kb at least 0")
    for link in topology.links:
        if not 0 <= link.jitter_ms <= link.latency_ms:
            raise ValueError(f"jitter_ms={link.jitter_ms:g} of link {'-'.join(link.sites)}: take 0 to latency_ms")


def _check_links(topology: Topology) -> None:
    wanted = {frozenset(pair) for pair in combinations(topology.sites, 2)}
    given = Counter(frozenset(link.sites) for link in topology.links)
    for pair, count in given.items():
        if pair not in wanted or count > 1:
            raise ValueError(f"links: {'-'.join(sorted(pair))} must be two different sites of the bed, and stand once")
    if absent := wanted - set(given):
        raise ValueError(f"links: give one for {', '.join('-'.join(sorted(pair)) for pair in absent)}")
