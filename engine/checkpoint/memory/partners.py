"""Partners: which rank, on another host, keeps a copy of a rank's memory checkpoint."""

from __future__ import annotations

from collections.abc import Sequence


def partners(hosts: Sequence[int], sites: Sequence[int]) -> tuple[int | None, ...]:
    """Return for each rank the one that keeps its copy; None where all ranks are on one host.

    Each host keeps the copies of one other host, so that every host may be lost alone. It is one of
    the same site if there is one: the links between sites belong to training.

    Args:
        hosts: the host of each rank.
        sites: the site of each rank; ranks of a host may belong to several.
    """
    members = {host: [rank for rank, of_rank in enumerate(hosts) if of_rank == host] for host in sorted(set(hosts))}
    site_of = {host: sites[ranks[0]] for host, ranks in members.items()}
    keepers = {host: _next(host, site_of) for host in members}
    kept: list[int | None] = []
    for rank, host in enumerate(hosts):
        keeper = keepers[host]
        kept.append(None if keeper is None else members[keeper][members[host].index(rank) % len(members[keeper])])
    return tuple(kept)


def _next(host: int, site_of: dict[int, int]) -> int | None:
    """The host after ``host``, in a ring of its site's hosts; of all hosts if its site has no other."""
    near = [other for other, site in site_of.items() if site == site_of[host]]
    ring = near if len(near) > 1 else list(site_of)
    after = ring[(ring.index(host) + 1) % len(ring)]
    return None if after == host else after
