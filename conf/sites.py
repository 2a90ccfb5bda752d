"""Sites: how many pipeline ranks each holds, and checks of the mapping from hosts to sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from math import inf
from pathlib import Path

from weft.conf.hosts import asks_for_nodes, read_hostfile, working_hosts, world_size
from weft.conf.schema import WeftConfig


def ranks_per_site(config: WeftConfig) -> tuple[int, ...]:
    """Pipeline ranks of each site, in pipeline order; empty for one site.

    A site holds consecutive stages, with all of their replicas (Atlas section 4.2).

    Args:
        config: a configuration without `site_problems`.
    """
    sites = config.cluster.sites
    if asks_for_nodes(config.cluster):
        replicas = world_size(config.cluster) // config.pipeline.stages
        return tuple(site.nodes * config.cluster.ranks // replicas for site in sites)
    if not any(site.hosts for site in sites):
        return tuple(site.ranks for site in sites)
    slots = working_hosts(config.cluster)
    replicas = sum(slots.values()) // config.pipeline.stages
    return tuple(sum(slots.get(host, 0) for host in site.hosts) // replicas for site in sites)


def site_problems(config: WeftConfig) -> Iterator[str]:
    """One line for each problem with the sites and the links between them."""
    sites = config.cluster.sites
    names = [site.name for site in sites]
    for name, count in Counter(names).items():
        if not name or count > 1:
            yield f"cluster.sites.name={name!r}: {count} sites have this name; give every site a unique name"
    if asks_for_nodes(config.cluster):
        yield from _by_nodes(config)
    elif not any(site.hosts for site in sites):
        yield from _by_ranks(config)
    elif not config.cluster.hostfile:
        yield "cluster.sites.hosts: they need a hostfile, and there is none; set cluster.hostfile"
    elif Path(config.cluster.hostfile).expanduser().is_file():
        yield from _by_hosts(config)
    yield from _links(config, names)


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
    if sites and sum(site.ranks for site in sites) != stages and not config.cluster.hostfile:
        listed = " + ".join(str(site.ranks) for site in sites)
        yield (
            f"pipeline.stages={stages}: the sites hold {listed} = {sum(site.ranks for site in sites)} pipeline ranks; "
            "make cluster.sites add up to it"
        )


def _by_nodes(config: WeftConfig) -> Iterator[str]:
    cluster, stages = config.cluster, config.pipeline.stages
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
    world = world_size(cluster)
    if wrong or not cluster.sites or world % stages:
        return
    for site in cluster.sites:
        if site.nodes * cluster.ranks % (world // stages):
            yield (
                f"cluster.sites.nodes={site.nodes}: {cluster.ranks} ranks on each host of site {site.name!r} are not a "
                f"multiple of the {world // stages} replicas of a stage, which must share a site; change "
                "cluster.sites.nodes, cluster.ranks or pipeline.stages"
            )


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
    replicas, rest = divmod(sum(working.values()), stages)
    for site in sites:
        count = sum(working.get(host, 0) for host in site.hosts)
        if not rest and (not count or count % replicas):
            yield (
                f"cluster.sites: site {site.name!r} has {count} slots, not a multiple of the {replicas} replicas of a "
                "stage, which must share a site; change its slots, or pipeline.stages"
            )
        elif not rest and site.ranks not in (0, count // replicas):
            yield (
                f"cluster.sites.ranks={site.ranks}: the hosts of site {site.name!r} hold {count // replicas} pipeline "
                "ranks; correct it, or leave it out"
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
