"""Sites: the pipeline ranks of each site, and checks of the mapping from hosts to sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from math import inf
from pathlib import Path

from weft.conf.hosts import asks_for_nodes, read_hostfile, working_hosts, world_size
from weft.conf.schema import ClusterConfig, SiteConfig, WeftConfig


def ranks_per_site(config: WeftConfig) -> tuple[int, ...]:
    """Return the number of pipeline ranks of each site, in pipeline order, route by route. Empty for one site.

    A site has consecutive stages with all of their replicas (Atlas section 4.2). If there are several routes, it has
    only the replicas of its route.

    Args:
        config: a configuration without `site_problems`.
    """
    sites = config.cluster.sites
    if asks_for_nodes(config.cluster):
        lines = world_size(config.cluster) // config.pipeline.stages // num_routes(config.cluster)
        return tuple(site.nodes * config.cluster.ranks // lines for site in sites)
    if not any(site.hosts for site in sites):
        return tuple(site.ranks for site in sites)
    slots = working_hosts(config.cluster)
    lines = sum(slots.values()) // config.pipeline.stages // num_routes(config.cluster)
    return tuple(sum(slots.get(host, 0) for host in site.hosts) // lines for site in sites)


def num_routes(cluster: ClusterConfig) -> int:
    """Return the number of sets of replicas that go through different sites, which is at least 1."""
    return max(1, len(cluster.routes))


def routes_of(cluster: ClusterConfig) -> list[list[str]]:
    """Return the names of the sites of each route."""
    return cluster.routes or [[site.name for site in cluster.sites]]


def site_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each problem with the sites and the links between them."""
    sites = config.cluster.sites
    names = [site.name for site in sites]
    for name, count in Counter(names).items():
        if not name or count > 1:
            yield f"cluster.sites.name={name!r}: {count} sites have this name; give every site a unique name"
    if wrong := list(_routes(config.cluster, names)):
        yield from wrong
        return
    if asks_for_nodes(config.cluster):
        wrong = list(_by_nodes(config))
    elif not any(site.hosts for site in sites):
        wrong = list(_by_ranks(config))
    elif not config.cluster.hostfile:
        wrong = ["cluster.sites.hosts: they need a hostfile, and there is none; set cluster.hostfile"]
    elif Path(config.cluster.hostfile).expanduser().is_file():
        wrong = list(_by_hosts(config))
    yield from wrong or _side_by_side(config)
    yield from _links(config, names)


def _side_by_side(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting that replicas on several routes do not support."""
    if config.comm.cell == 1 or len(config.cluster.routes) < 2:
        return
    hostfile = config.cluster.hostfile
    if hostfile and not Path(hostfile).expanduser().is_file():
        return  # reported elsewhere
    held = iter(ranks_per_site(config))
    cuts = {tuple(next(held) for _ in route) for route in config.cluster.routes}
    if len(cuts) > 1:
        yield (
            f"comm.cell={config.comm.cell}: the DP-cells of all routes follow one schedule, and the routes are cut "
            "into sites in different ways; set comm.cell=1"
        )


def _routes(cluster: ClusterConfig, names: list[str]) -> Iterator[str]:
    if not cluster.routes:
        return
    taken = list(chain.from_iterable(cluster.routes))
    for name, count in Counter(taken).items():
        if name not in names:
            yield f"cluster.routes: {name!r} is no site; cluster.sites has {', '.join(names) or 'none'}"
        elif count > 1:
            yield f"cluster.routes: site {name!r} is named {count} times; a site holds replicas of one route"
    for name in names:
        if name not in taken:
            yield f"cluster.routes: site {name!r} is on no route; add it to one, or leave it out of cluster.sites"
    if not all(cluster.routes):
        yield "cluster.routes: a route without sites; leave it out"
    if sorted(taken) == sorted(names) and taken != names:
        yield (
            f"cluster.routes={cluster.routes}: ranks are numbered route by route, and cluster.sites lists "
            f"{', '.join(names)}; list the sites in the order {', '.join(taken)}"
        )


def _by_ranks(config: WeftConfig) -> Iterator[str]:
    sites, stages = config.cluster.sites, config.pipeline.stages
    for site in sites:
        if config.cluster.hostfile:
            yield (
                f"cluster.sites.hosts=[]: nothing says which hosts of {config.cluster.hostfile} are in site "
                f"{site.name!r}; list them"
            )
        elif site.ranks < 1:
            yield f"cluster.sites.ranks={site.ranks}: site {site.name!r} holds no pipeline rank; give it one"
    for route in _on_routes(config.cluster):
        total = sum(site.ranks for site in route)
        if route and total != stages and not config.cluster.hostfile:
            listed = " + ".join(str(site.ranks) for site in route)
            yield (
                f"pipeline.stages={stages}: the sites {'of a route ' if config.cluster.routes else ''}hold {listed} = "
                f"{total} pipeline ranks; make cluster.sites add up to it"
            )


def _on_routes(cluster: ClusterConfig) -> list[list[SiteConfig]]:
    named = {site.name: site for site in cluster.sites}
    return [[named[name] for name in route] for route in routes_of(cluster)]


def _shared_out(config: WeftConfig, held: Mapping[str, int], where: str) -> Iterator[str]:
    """Yield a line for each problem with the ranks of the sites.

    A site must have equally many ranks of each of its stages, and each route must have all stages.

    Args:
        held: ranks of each site.
        where: names the field and the owner of the ranks in the error.
    """
    cluster, stages = config.cluster, config.pipeline.stages
    total, several = sum(held.values()), len(cluster.routes) > 1
    if total % stages:
        return  # reported when replicas are counted
    lines, rest = divmod(total // stages, num_routes(cluster))
    if rest:
        yield (
            f"cluster.routes: {total // stages} replicas of {stages} stages cannot be shared out evenly over "
            f"{len(cluster.routes)} routes; change their hosts, or pipeline.stages"
        )
        return
    of_route = "of a stage on its route" if several else "of a stage"
    for site, count in held.items():
        if not count or count % lines:
            yield (
                f"{where} site {site!r} make {count} slots, not a multiple of the {lines} replicas {of_route}, which "
                "must share a site; change them, or pipeline.stages"
            )
            return
    for route in cluster.routes:
        if (found := sum(held[name] for name in route) // lines) != stages:
            yield (
                f"cluster.routes: the sites {' and '.join(route)} hold {found} pipeline ranks of {lines} replicas, and "
                f"pipeline.stages={stages}; give each route as many hosts as every other"
            )


def _by_nodes(config: WeftConfig) -> Iterator[str]:
    cluster = config.cluster
    manager = cluster.manager.name
    if not cluster.sites:
        yield (
            f"cluster.sites=[]: {manager} is asked for hosts site by site; set cluster.sites=[{{name: here, nodes: "
            "2}], or cluster.hostfile"
        )
    wrong = False
    for site in cluster.sites:
        for field, least in (("nodes", 1), ("spares", 0)):
            if (number := getattr(site, field)) < least:
                wrong = True
                yield f"cluster.sites.{field}={number}: site {site.name!r} needs at least {least}"
        for field in ("hosts", "ranks"):
            if given := getattr(site, field):
                yield (
                    f"cluster.sites.{field}={given}: {manager} chooses the hosts; give site {site.name!r} nodes instead"
                )
    if not wrong and cluster.sites:
        held = {site.name: site.nodes * cluster.ranks for site in cluster.sites}
        yield from _shared_out(config, held, f"cluster.sites.nodes: {cluster.ranks} ranks on each host of")


def _by_hosts(config: WeftConfig) -> Iterator[str]:
    sites, stages = config.cluster.sites, config.pipeline.stages
    slots = read_hostfile(config.cluster.hostfile)
    counts = Counter(chain.from_iterable(site.hosts for site in sites))
    listed = list(counts)
    wrong = False
    for host, count in counts.items():
        if host not in slots or count > 1:
            wrong = True
            what = f"is not in {config.cluster.hostfile}" if host not in slots else f"is in {count} sites"
            yield f"cluster.sites.hosts: host {host} {what}; name each host of the hostfile once"
    for host in slots:
        if host not in counts:
            wrong = True
            yield f"cluster.sites.hosts: host {host} of {config.cluster.hostfile} is in no site; add it to one"
    if wrong:
        return
    if list(slots) != listed:
        yield (
            f"cluster.sites.hosts={listed}: {config.cluster.hostfile} numbers ranks in the order {list(slots)}; write "
            "its lines in the order of the sites"
        )
    working = working_hosts(config.cluster)
    held = {site.name: sum(working.get(host, 0) for host in site.hosts) for site in sites}
    if uneven := list(_shared_out(config, held, "cluster.sites: the hosts of")):
        yield from uneven
        return
    lines = sum(held.values()) // stages // num_routes(config.cluster)
    for site in sites if lines else ():
        if site.ranks not in (0, held[site.name] // lines):
            yield (
                f"cluster.sites.ranks={site.ranks}: the hosts of site {site.name!r} hold {held[site.name] // lines} "
                "pipeline ranks; correct it, or leave it out"
            )


def _links(config: WeftConfig, names: list[str]) -> Iterator[str]:
    seen: set[frozenset[str]] = set()
    for link in config.cluster.links:
        ends = frozenset(link.sites)
        if len(link.sites) != 2 or len(ends) != 2:
            yield f"cluster.links.sites={link.sites}: a link joins two sites; name both"
        elif ends - set(names):
            yield f"cluster.links.sites={link.sites}: cluster.sites has {', '.join(names) or 'none'}; correct it"
        elif ends in seen:
            yield f"cluster.links.sites={link.sites}: this link is given twice; leave one out"
        seen.add(ends)
        for field in ("latency_ms", "bandwidth_mbps", "pair_mbps"):
            value = getattr(link, field)
            if not 0 <= value < inf:
                yield (
                    f"cluster.links.{field}={value:g}: not a finite number of at least 0; give what a probe "
                    "measures, or 0"
                )
