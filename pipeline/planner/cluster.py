"""The cluster: sites with their GPUs and prices, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from weft.conf.host.documents import read_yaml
from weft.pipeline.hardware import EFFICIENCY, GpuKind, gpu_kind
from weft.pipeline.limits import count, known_fields, number, short_repr

MOST_BYTES = 2**20
_SITE_FIELDS = ("name", "hosts", "gpus_per_host", "gpu", "price", "network_gbps", "region")
_LINK_FIELDS = ("sites", "latency_ms", "bandwidth_mbps", "pair_mbps", "egress_price")
_IN_HOST_NAMES = re.compile(r"[a-z0-9][\w.-]{,49}", re.ASCII | re.IGNORECASE)
_TEXTS = ("sites.*.name", "sites.*.gpu", "sites.*.region", "links.*.sites.*")
BITS_IN_FLIGHT = 12.2e6
"""Bits in flight of one TCP connection: 1,220 Mbit/s at a delay of 10 ms, 293 at 40 (Atlas table 1)."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A data centre.

    Attributes:
        network_bps: bandwidth of a host inside of the site.
        region: region to which data may be restricted.
    """

    name: str
    hosts: int
    gpus_per_host: int
    gpu: GpuKind
    price: float = 0.0
    network_bps: float = 400e9
    region: str = ""

    @property
    def gpus(self) -> int:
        """The number of GPUs of all hosts."""
        return self.hosts * self.gpus_per_host

    @property
    def bps_of_gpu(self) -> float:
        """A GPU's share of its host's network inside of the site."""
        return self.network_bps / self.gpus_per_host

    def units(self, gpus: int) -> int:
        """Return how many groups of ``gpus`` GPUs fit; a group either shares a host or takes whole hosts."""
        if gpus <= self.gpus_per_host:
            return self.hosts * (self.gpus_per_host // gpus)
        return self.hosts // -(-gpus // self.gpus_per_host)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between two sites, in each direction.

    Attributes:
        bandwidth_bps: bandwidth of a host's uplink.
        pair_bps: bandwidth between one pair of hosts, if it is less than the uplink's.
        egress_price: price of a gigabyte that leaves a site.
    """

    latency_s: float = 0.0
    bandwidth_bps: float = 5e9
    pair_bps: float = float("inf")
    egress_price: float = 0.0

    @property
    def connections(self) -> int:
        """The number of TCP connections that fill the link."""
        return max(1, -int(-min(self.bandwidth_bps, self.pair_bps) * self.latency_s // BITS_IN_FLIGHT))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts and links that could be rented.

    Attributes:
        links: links by the numbers of their two sites, the lower first; sites without a link are not neighbours.
        efficiency: share of its peak that a GPU reaches.
    """

    sites: tuple[Site, ...]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    efficiency: float = EFFICIENCY

    def link(self, here: int, there: int) -> Link | None:
        """Return the link between two sites, or None if they are not neighbours."""
        return self.links.get((min(here, there), max(here, there)))

    def number(self, name: str, what: str) -> int:
        """Return the number of the site of that name. Raise ValueError if there is none."""
        names = [site.name for site in self.sites]
        if name not in names:
            raise ValueError(f"{what}={name}: there is no such site; the cluster has {', '.join(names)}")
        return names.index(name)

    def with_site(self, number: int, **changes: Any) -> Cluster:
        """Return the cluster with fields of one site replaced."""
        sites = list(self.sites)
        sites[number] = replace(sites[number], **changes)
        return replace(self, sites=tuple(sites))

    def with_link(self, here: int, there: int, **changes: Any) -> Cluster:
        """Return the cluster with fields of one link replaced."""
        pair = (min(here, there), max(here, there))
        return replace(self, links={**self.links, pair: replace(self.links[pair], **changes)})


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    The format. For a site, all fields except the price are required. For a link, its sites and bandwidth are::

        efficiency: 0.4          # share of its peak that a GPU reaches; `weft profile` measures it
        sites:
          - {name: east, hosts: 75, gpus_per_host: 8, gpu: H100, price: 2.5, network_gbps: 3200, region: us}
          - {name: west, hosts: 75, gpus_per_host: 8, gpu: A100, price: 1.4}
        links:                   # between every two of the sites that are named
          - {sites: [east, west], latency_ms: 30, bandwidth_mbps: 5000, pair_mbps: 5000, egress_price: 0.02}

    Raises:
        ValueError: the file cannot be read, or a field is unknown, missing or wrong; the message names it.
    """
    try:
        return _cluster(read_yaml(path, most_bytes=MOST_BYTES, texts=_TEXTS))
    except ValueError as error:
        raise ValueError(f"cluster file {path}: {error}") from error


def _cluster(data: Any) -> Cluster:
    table = known_fields(data, "the file", ("efficiency", "sites", "links"))
    entries = table.get("sites")
    if not isinstance(entries, list) or not entries:
        raise ValueError("sites: missing; list at least one site")
    sites = tuple(_site(entry, f"sites[{place}]") for place, entry in enumerate(entries))
    names = [site.name for site in sites]
    if not any(site.gpus for site in sites):
        raise ValueError("sites.hosts: no site has a GPU; give at least one site a host")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"sites.name={name}: {names.count(name)} sites have this name; give every site its own")
    links: dict[tuple[int, int], Link] = {}
    given = table.get("links") or []
    if not isinstance(given, list):
        raise ValueError(f"links={short_repr(given)}: expected a list")
    for place, entry in enumerate(given):
        for pair, link in _links(entry, f"links[{place}]", names):
            if pair in links:
                raise ValueError(
                    f"links[{place}]: {names[pair[0]]} and {names[pair[1]]} have a link already; leave one out"
                )
            links[pair] = link
    joined = {site for pair in links for site in pair}
    if len(sites) > 1 and (alone := [name for place, name in enumerate(names) if place not in joined]):
        other = names[1] if alone[0] == names[0] else names[0]
        raise ValueError(
            f"links: site {alone[0]} has no link, so no pipeline can go through it and others; add "
            f"`- {{sites: [{other}, {alone[0]}], latency_ms: 20, bandwidth_mbps: 5000}}`, or leave the site out"
        )
    efficiency = number(table.get("efficiency", EFFICIENCY), "efficiency", above=0.0)
    if efficiency > 1:
        raise ValueError(f"efficiency={efficiency:g}: a share of the peak, at most 1")
    return Cluster(sites=sites, links=links, efficiency=efficiency)


def _site(data: Any, name: str) -> Site:
    table = known_fields(data, name, _SITE_FIELDS)
    for required in ("name", "hosts", "gpus_per_host", "gpu"):
        if required not in table:
            raise ValueError(f"{name}.{required}: missing")
    called = table["name"]
    if called is None or not _IN_HOST_NAMES.fullmatch(str(called)):
        raise ValueError(
            f"{name}.name={short_repr(called)}: expected a word of at most 50 letters, digits, dots, hyphens and "
            "underscores, the first a letter or digit; it is part of host names in a recipe"
        )
    return Site(
        name=str(called),
        hosts=count(table["hosts"], f"{name}.hosts", least=0, most=10**6),
        gpus_per_host=count(table["gpus_per_host"], f"{name}.gpus_per_host", most=1024),
        gpu=gpu_kind(str(table["gpu"]), f"{name}.gpu"),
        price=number(table.get("price", 0.0), f"{name}.price"),
        network_bps=number(table.get("network_gbps", 400.0), f"{name}.network_gbps", above=0.0) * 1e9,
        region=str(table.get("region", "")),
    )


def _links(data: Any, name: str, names: list[str]) -> Iterator[tuple[tuple[int, int], Link]]:
    table = known_fields(data, name, _LINK_FIELDS)
    ends = table.get("sites")
    if not isinstance(ends, list) or len(ends) < 2 or len(set(map(str, ends))) < len(ends):
        raise ValueError(f"{name}.sites={short_repr(ends)}: expected the names of two or more sites")
    for end in ends:
        if end not in names:
            raise ValueError(f"{name}.sites={short_repr(ends)}: there is no site {end}; sites has {', '.join(names)}")
    if "bandwidth_mbps" not in table:
        raise ValueError(f"{name}.bandwidth_mbps: missing; `weft doctor net` measures it")
    link = Link(
        latency_s=number(table.get("latency_ms", 0.0), f"{name}.latency_ms") / 1e3,
        bandwidth_bps=number(table["bandwidth_mbps"], f"{name}.bandwidth_mbps", above=0.0) * 1e6,
        pair_bps=number(table.get("pair_mbps", float("inf")), f"{name}.pair_mbps", above=0.0, free=True) * 1e6,
        egress_price=number(table.get("egress_price", 0.0), f"{name}.egress_price"),
    )
    for pair in combinations(sorted(names.index(end) for end in ends), 2):
        yield pair, link
