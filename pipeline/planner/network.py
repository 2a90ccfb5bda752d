"""A cluster's network: links of a pipeline, and seconds of collectives over GPUs, hosts and sites."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any

from weft.pipeline.costs import LinkCost
from weft.pipeline.planner.cluster import Cluster, Site
from weft.pipeline.planner.layout import Layout, Shape

MANY_BYTES = 1e15
"""Large enough that latency is negligible when seconds per byte are derived."""
STARTING_S = 2e-5
"""Seconds per member to start a collective between hosts (alpha of NCCL's rings)."""


@dataclass(frozen=True)
class Network:
    """The links of a cluster's hosts and sites."""

    cluster: Cluster

    def over_sites_s(self, each: float, sites: Sequence[int]) -> float:
        """Return the seconds in which replicas at several sites exchange their shards. Infinite without a link.

        Each GPU exchanges its shard with the GPUs that have the same shard at the other sites. All GPUs do so at once,
        each over its share of its host's uplink.

        Args:
            each: bytes that a GPU sends to each other site.
            sites: sites of a pipeline rank, one for each route.
        """
        seconds = 0.0
        for here in sites:
            links = [self.cluster.link(here, there) for there in sites if there != here]
            gpus = self.cluster.sites[here].gpus_per_host
            if None in links:
                return inf
            known = [link for link in links if link is not None]
            uplink_s = sum(each * 8 * gpus / link.bandwidth_bps for link in known)
            pair_s = max((each * 8 * gpus / link.pair_bps for link in known), default=0.0)
            latency_s = max((link.latency_s for link in known), default=0.0)
            seconds = max(seconds, 2 * latency_s + max(uplink_s, pair_s))
        return seconds

    def best_sites(self, routes: int) -> list[tuple[float, float]]:
        """Return (latency, seconds per byte) of sites for the least time of an exchange between ``routes`` sites.

        Sites that another site beats in both values are left out.
        """
        if routes not in self._known_best:
            found = []
            for here in self._with_gpus:
                start_s = self.least_from_s(here, (), routes, 0.0)
                found.append((start_s, (self.least_from_s(here, (), routes, MANY_BYTES) - start_s) / MANY_BYTES))
            best: list[tuple[float, float]] = []
            for start_s, byte_s in sorted(one for one in found if one[0] < inf):
                if not best or byte_s < best[-1][1]:
                    best.append((start_s, byte_s))
            self._known_best[routes] = best
        return self._known_best[routes]

    @cached_property
    def _known_best(self) -> dict[int, list[tuple[float, float]]]:
        return {}

    def least_from_s(self, here: int, known: Sequence[int], routes: int, sent: float) -> float:
        """Return the least seconds for a GPU at a site to send ``sent`` bytes to each of the other routes' sites.

        Args:
            known: the sites that are fixed; the others are those with the best links.
            routes: number of routes.
        """
        best = self._uplinks[here]
        if any(site != here and site not in best for site in known):
            return inf
        if not self._may_be(frozenset((here, *known)), routes):
            return inf
        settled = [best[site] for site in known if site != here]
        missing = routes - 1 - len(settled)
        others = [uplink for site, uplink in best.items() if site not in known][:missing]
        latencies = [latency_s for latency_s, _ in settled] + [min((one for one, _ in best.values()), default=0.0)]
        return 2 * max(latencies) + sent * sum(byte_s for _, byte_s in settled + others)

    def _may_be(self, sites: frozenset[int], count: int) -> bool:
        """Return True if ``count`` sites with links between any two of them include these, which have such links."""
        if len(sites) >= count:
            return True
        if (sites, count) not in self._known_meshes:
            others = frozenset.intersection(*(frozenset(self._uplinks[site]) for site in sites))
            enough = len(others) >= count - len(sites)
            self._known_meshes[sites, count] = enough and any(self._may_be(sites | {one}, count) for one in others)
        return self._known_meshes[sites, count]

    @cached_property
    def _known_meshes(self) -> dict[tuple[frozenset[int], int], bool]:
        return {}

    @cached_property
    def _with_gpus(self) -> list[int]:
        return [number for number, site in enumerate(self.cluster.sites) if site.gpus]

    @cached_property
    def _uplinks(self) -> list[dict[int, tuple[float, float]]]:
        """By site and linked site with GPUs: the latency, and the seconds per byte of a GPU.

        The fastest uplinks come first.
        """
        found = []
        for here, site in enumerate(self.cluster.sites):
            links = [
                (there, link) for there in self._with_gpus if there != here and (link := self.cluster.link(here, there))
            ]
            each = {there: (link.latency_s, 8 * site.gpus_per_host / link.bandwidth_bps) for there, link in links}
            found.append(dict(sorted(each.items(), key=lambda entry: entry[1][1])))
        return found

    def links(self, layout: Layout) -> tuple[LinkCost, tuple[tuple[tuple[int, int], LinkCost], ...]]:
        """Return the links of one pipeline: inside of sites, and by two of its sites."""
        key = layout.sites, layout.gpus_per_rank
        if key not in self._known_links:
            pairs = {}
            for place, (here, there) in enumerate(pairwise(layout.sites)):
                cost = self.link_cost(here, there, layout)
                pairs[place, place + 1] = pairs[place + 1, place] = cost
            local = self.local_link(min(self.cluster.sites[site].bps_of_gpu for site in layout.sites), layout)
            self._known_links[key] = local, tuple(pairs.items())
        return self._known_links[key]

    @cached_property
    def _known_links(self) -> dict[Hashable, Any]:
        return {}

    def local_link(self, bps_of_gpu: float, shape: Shape) -> LinkCost:
        """Return one pipeline's share of the network inside of a site."""
        return LinkCost(latency_s=STARTING_S, bandwidth_bps=bps_of_gpu * shape.gpus_per_rank)

    def link_cost(self, here: int, there: int, shape: Shape) -> LinkCost:
        """Return one pipeline's share of a link: a host's uplink times the pipeline's share of the host's GPUs."""
        link = self.cluster.link(here, there)
        assert link is not None, "not neighbours"
        hosts = min(shape.gpus_per_rank / self.cluster.sites[site].gpus_per_host for site in (here, there))
        return LinkCost(
            latency_s=link.latency_s,
            bandwidth_bps=link.bandwidth_bps * hosts,
            pair_bps=link.pair_bps * hosts,
            streams=link.connections,
        )


def exchange_s(num_bytes: float, members: int, span: int, site: Site) -> float:
    """Return the seconds of a collective among ``members`` ranks within ``span`` neighbouring GPUs."""
    starting_s = site.gpu.scale_up_latency_s if span <= site.gpus_per_host else STARTING_S
    return starting_s * (members - 1) + num_bytes / bytes_per_s(span, site)


def bytes_per_s(span: int, site: Site) -> float:
    """Return the bytes per second of a GPU in a group of ``span`` neighbouring GPUs."""
    return site.gpu.scale_up_bytes_per_s if span <= site.gpus_per_host else site.network_bps / 8 / site.gpus_per_host


def over_gpus_s(moved: float, count: int, apart: int, site: Site) -> float:
    """Return the seconds of reducing or gathering ``moved`` bytes over ``count`` GPUs, every ``apart``-th of a site."""
    if count == 1:
        return 0.0
    together = min(count, max(1, site.gpus_per_host // apart))
    hosts = -(-count // together)
    seconds = 2 * site.gpu.scale_up_latency_s * (together - 1) + 2 * STARTING_S * (hosts - 1)
    seconds += moved * (together - 1) / together / site.gpu.scale_up_bytes_per_s
    network = site.network_bps / 8 / site.gpus_per_host
    return seconds + moved / together * (hosts - 1) / hosts / network
