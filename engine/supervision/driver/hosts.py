"""Choice of an attempt's hosts: working hosts, spares for lost ones, and fewer replicas if necessary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from weft.conf.batch import fit_batch, lines_of_replica, num_replicas
from weft.conf.hosts import read_hostfile, world_size
from weft.conf.schema import ClusterConfig, SiteConfig, WeftConfig
from weft.conf.sites import num_routes, ranks_per_site, routes_of


@dataclass(frozen=True)
class Layout:
    """The hosts of an attempt.

    Attributes:
        slots: number of ranks by host, in the order of the ranks.
        master: address and port of the ranks' rendezvous.
        arguments: command-line arguments of each rank.
    """

    slots: Mapping[str, int]
    master: tuple[str, int]
    arguments: tuple[str, ...]

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks on all hosts."""
        return sum(self.slots.values())

    @cached_property
    def ranks(self) -> Mapping[str, list[int]]:
        """Global ranks by host."""
        ends = accumulate(self.slots.values())
        pairs = zip(self.slots.items(), ends, strict=True)
        return {host: list(range(end - count, end)) for (host, count), end in pairs}

    def host_of(self, rank: int) -> str:
        """Return the host of a rank."""
        return next(host for host, ranks in self.ranks.items() if rank in ranks)


THIS_MACHINE = "localhost"
"""Name of the host of a run without a hostfile."""


@dataclass(frozen=True)
class ChosenHosts:
    """The hosts of an attempt, and how the pipelines are placed on them.

    Attributes:
        slots: number of ranks by host, in the order in which ranks are numbered.
        sites: number of pipeline ranks by site, in pipeline order. Without sites there is one entry, named "".
        microbatches: number per step and replica, chosen to preserve the batch size.
        waiting: healthy hosts without ranks.
        refused: why more replicas are impossible, or empty if all replicas are used.
    """

    slots: Mapping[str, int]
    sites: Mapping[str, int]
    hosts_of: Mapping[str, tuple[str, ...]]
    replicas: int
    microbatches: int
    waiting: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Site:
    """A site of the configuration.

    Attributes:
        slots: number of slots of each host, with spares last.
        stages: number of pipeline ranks while every host works.
        num_working: number of hosts that are not spares.
        route: the route of the replicas at this site.
    """

    name: str
    slots: Mapping[str, int]
    stages: int
    num_working: int
    route: int = 0


def choose_hosts(
    config: WeftConfig,
    *,
    away: Collection[str] = (),
    current: Mapping[str, int] | None = None,
    shortage: Callable[[int], str] = lambda replicas: "",
) -> ChosenHosts:
    """Choose the hosts of the next attempt.

    The number of replicas is the largest that the working hosts allow, that divides the batch, and that does not
    exceed the run's initial number. A site keeps its pipeline ranks while its hosts have slots for them. Otherwise
    sites with free slots take them. A lost host's ranks move to its replacement, so that the others keep their ranks.
    A host that returns becomes a spare, or adds replicas. If there are several routes through sites, each has the
    same number of replicas, and a route with too few slots is omitted.

    Args:
        config: the run's configuration, with a fixed ``pipeline.microbatches`` and all hosts.
        away: hosts that were evicted or are lost.
        current: ``slots`` of the previous attempt, preserved as far as possible, or None for the first.
        shortage: returns why a number of replicas does not fit into memory, or empty if it may.

    Raises:
        ValueError: not even one replica is possible. The message has the reason for each number of replicas.
    """
    full = num_replicas(config, world_size(config.cluster))
    sites = _sites(config)
    healthy = [_left(site, away) for site in sites]
    refused: list[str] = []
    for replicas, kept in _numbers(full, num_routes(config.cluster)):
        ranks = replicas // kept * lines_of_replica(config)
        shares = _shares_on_routes(sites, [sum(slots.values()) for slots in healthy], ranks, kept)
        if shares is None:
            free = ", ".join(
                f"{site.name or 'the hosts'}: {sum(slots.values())}" for site, slots in zip(sites, healthy, strict=True)
            )
            refused.append(f"{replicas} replicas of {config.pipeline.stages} stages: too few slots are left ({free})")
            continue
        if short := shortage(replicas):
            refused.append(f"{replicas} replicas of {config.pipeline.stages} stages: {short}")
            continue
        try:
            fitted = _fitted(config, sites, shares, full, replicas)
        except ValueError as error:
            refused.append(f"{replicas} replicas: {error}")
            continue
        seats = [
            _seats(site, slots, ranks * share, current)
            for site, slots, share in zip(sites, healthy, shares, strict=True)
        ]
        used = {host: count for site in seats for host, count in site.items()}
        return ChosenHosts(
            slots=used,
            sites={site.name: share for site, share in zip(sites, shares, strict=True) if share},
            hosts_of={site.name: tuple(hosts) for site, hosts in zip(sites, seats, strict=True) if hosts},
            replicas=replicas,
            microbatches=fitted.pipeline.microbatches,
            waiting=tuple(host for slots in healthy for host in slots if host not in used),
            refused=tuple(refused),
        )
    raise ValueError("no hosts to go on with\n" + "\n".join(refused))


def config_for(config: WeftConfig, chosen: ChosenHosts, hostfile: Path) -> WeftConfig:
    """Return the run's configuration for ``chosen``. The caller writes `hostfile_text` to ``hostfile``.

    Fewer replicas get more micro-batches, so that the batch size is preserved. Sites without ranks are omitted
    with their links, and the rendezvous moves to the first host if its own is away.
    """
    cluster = config.cluster
    if not cluster.hostfile:
        return config
    sites = [
        replace(site, hosts=list(chosen.hosts_of[site.name]), ranks=0)
        for site in cluster.sites
        if site.name in chosen.hosts_of
    ]
    first = next(iter(chosen.slots))
    moved = cluster.master_addr in read_hostfile(cluster.hostfile) and cluster.master_addr not in chosen.slots
    cluster = replace(
        cluster,
        hostfile=str(hostfile),
        sites=sites,
        links=[link for link in cluster.links if set(link.sites) <= set(chosen.hosts_of)],
        routes=_routes_left(cluster, chosen.hosts_of),
        spares=[],
        master_addr=first if moved else cluster.master_addr,
    )
    return _with_batch(replace(config, cluster=cluster), _batch(config), chosen.replicas, chosen.microbatches)


def on_hosts(config: WeftConfig, hosts: Mapping[str, Sequence[str]], master_addr: str, hostfile: str) -> WeftConfig:
    """Return the configuration of a run whose manager has chosen its hosts. The caller writes `hostfile_text`.

    Args:
        hosts: hosts of each site. The first ones work, and the rest are spares.
    """
    cluster = config.cluster
    cluster = replace(
        cluster,
        hostfile=hostfile,
        sites=[replace(site, hosts=list(hosts[site.name]), nodes=0, spares=0) for site in cluster.sites],
        spares=[host for site in cluster.sites for host in hosts[site.name][site.nodes :]],
        master_addr=master_addr,
        master_port=cluster.master_port or ClusterConfig.master_port,
    )
    return replace(config, cluster=cluster)


def hostfile_text(slots: Mapping[str, int]) -> str:
    """Return the hostfile of an attempt."""
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def _sites(config: WeftConfig) -> list[_Site]:
    cluster, shares = config.cluster, ranks_per_site(config) or (config.pipeline.stages,)
    if not cluster.hostfile:
        return [_Site("", {THIS_MACHINE: cluster.ranks}, config.pipeline.stages, 1)]
    slots = read_hostfile(cluster.hostfile)
    names = {site.name: site.hosts for site in cluster.sites} or {"": list(slots)}
    route_of = {name: number for number, route in enumerate(routes_of(cluster)) for name in route}
    found = []
    for (name, hosts), share in zip(names.items(), shares, strict=True):
        working = [host for host in hosts if host not in cluster.spares]
        spares = [host for host in hosts if host in cluster.spares]
        held = {host: slots[host] for host in (*working, *spares)}
        found.append(_Site(name, held, share, len(working), route_of.get(name, 0)))
    return found


def _numbers(full: int, routes: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of replicas, each with the number of routes that share them evenly: most replicas first."""
    for replicas in range(full, 0, -1):
        for kept in range(1, routes + 1):
            if replicas % kept == 0 and replicas // kept <= full // routes:
                yield replicas, kept


def _shares_on_routes(sites: Sequence[_Site], free: Sequence[int], ranks: int, kept: int) -> list[int] | None:
    """Return the number of stages of each site on the first routes with enough slots, or None if there are too few."""
    shares, left = [0] * len(sites), kept
    for route in sorted({site.route for site in sites}):
        places = [place for place, site in enumerate(sites) if site.route == route]
        found = _shares([sites[place] for place in places], [free[place] for place in places], ranks)
        if found is not None and left:
            left -= 1
            for place, share in zip(places, found, strict=True):
                shares[place] = share
    return None if left else shares


def _routes_left(cluster: ClusterConfig, names: Collection[str]) -> list[list[str]]:
    """Return the routes through the sites that have ranks, or an empty list if only one route is left."""
    left = [[name for name in route if name in names] for route in cluster.routes]
    left = [route for route in left if route]
    return left if len(left) > 1 else []


def _left(site: _Site, away: Collection[str]) -> dict[str, int]:
    return {host: count for host, count in site.slots.items() if host not in away}


def _shares(sites: Sequence[_Site], free: Sequence[int], ranks: int) -> list[int] | None:
    """Return the number of stages of each site, or None if slots are too few.

    A site keeps its own stages as far as its slots suffice. The rest go to sites with free slots.
    """
    most = [count // ranks for count in free]
    shares = [min(site.stages, room) for site, room in zip(sites, most, strict=True)]
    missing = sum(site.stages for site in sites) - sum(shares)
    for index, room in enumerate(most):
        more = min(missing, room - shares[index])
        shares[index] += more
        missing -= more
    return None if missing else shares


def _seats(site: _Site, healthy: Mapping[str, int], needed: int, current: Mapping[str, int] | None) -> dict[str, int]:
    """Return ranks by host. Hosts keep their ranks, and a lost host is replaced by the first host with enough slots."""
    before = {host: count for host, count in (current or {}).items() if host in site.slots}
    seats = before or dict(list(site.slots.items())[: site.num_working])
    free = [host for host in healthy if host not in seats]
    order: dict[str, int] = {}  # by host: its former ranks, or those of the host that it replaces
    for host, count in seats.items():
        if host not in healthy:
            substitute = next((other for other in free if healthy[other] >= count), None)
            if substitute is None:
                continue
            free.remove(substitute)
            host = substitute
        order[host] = count
    order |= {host: healthy[host] for host in free}
    if sum(order.values()) < needed:  # use all slots of hosts if their former ranks are not enough
        order = {host: healthy[host] for host in order}
    taken: dict[str, int] = {}
    for host, count in order.items():
        if taken_here := min(count, needed - sum(taken.values())):
            taken[host] = taken_here
    return taken


def _fitted(config: WeftConfig, sites: Sequence[_Site], shares: Sequence[int], full: int, replicas: int) -> WeftConfig:
    """Return the configuration with this number of replicas, before hosts are assigned.

    Raises:
        ValueError: the batch is not divisible, or the schedule does not support that number of micro-batches.
    """
    if replicas == full and all(site.stages == share for site, share in zip(sites, shares, strict=True)):
        return config
    left = [SiteConfig(name=site.name, ranks=share) for site, share in zip(sites, shares, strict=True) if share]
    names = {site.name for site in left}
    cluster = ClusterConfig(
        sites=left if config.cluster.sites else [],
        links=[link for link in config.cluster.links if set(link.sites) <= names],
        routes=_routes_left(config.cluster, names),
        ranks=replicas * lines_of_replica(config) * config.pipeline.stages,
    )
    return _with_batch(replace(config, cluster=cluster), _batch(config), replicas, 0)


def _batch(config: WeftConfig) -> int:
    replicas = num_replicas(config, world_size(config.cluster))
    return config.train.microbatch_size * config.pipeline.microbatches * replicas


def _with_batch(config: WeftConfig, batch: int, replicas: int, microbatches: int) -> WeftConfig:
    """Return the configuration with this batch. Cells have at most all replicas. 0 micro-batches means derived."""
    config = replace(
        config,
        train=replace(config.train, batch_size=batch),
        pipeline=replace(config.pipeline, microbatches=microbatches),
        comm=replace(config.comm, cell=min(config.comm.cell, replicas // num_routes(config.cluster))),
    )
    return fit_batch(config, replicas * lines_of_replica(config) * config.pipeline.stages)
