"""Choice of partners: the rank on another host that stores a copy of a rank's memory checkpoint."""

from __future__ import annotations

from collections.abc import Sequence


def partners(hosts: Sequence[int], sites: Sequence[int]) -> tuple[int | None, ...]:
    """Return the partner of each rank, or None if all ranks are on one host.

    Each host stores the copies of one other host, so that any single host may be lost. Partners are at the same site
    if possible, because links between sites are needed for training.

    Args:
        hosts: the host of each rank.
        sites: the site of each rank. Ranks of a host may belong to several.
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
    """Return the next host in a ring of the site's hosts, or of all hosts if the site has no other."""
    near = [other for other, site in site_of.items() if site == site_of[host]]
    ring = near if len(near) > 1 else list(site_of)
    after = ring[(ring.index(host) + 1) % len(ring)]
    return None if after == host else after
