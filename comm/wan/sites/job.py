"""A job over several sites: groups inside a site are gloo's or NCCL's, and all other groups are `SiteGroup`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from weft.comm.backends import gloo_group
from weft.comm.job import Job
from weft.comm.links import Sites
from weft.comm.wan.sites.group import SiteGroup
from weft.comm.wan.sites.links import SiteLinks


class SitesJob(Job):
    """A job whose default group spans several sites. See `Job`."""

    def __init__(self, links: SiteLinks) -> None:
        self.links, self._of_ranks = links, links.sites.of_ranks
        self.address = links.address

    def by_site(self, ranks: Iterable[int]) -> list[list[int]]:
        """See `Job`."""
        found: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            found.setdefault(self._of_ranks[rank], []).append(rank)
        return [found[site] for site in sorted(found)]

    def create_group(self, options: Any, inside: Callable[..., Any]) -> Any:
        """See `Job`."""
        ranks = options.global_ranks_in_group or range(len(self._of_ranks))
        if len({self._of_ranks[rank] for rank in ranks}) == 1:
            return inside(options.store, options.group_rank, len(ranks), options)
        return self.spanning(options, ranks)

    def spanning(self, options: Any, ranks: Sequence[int], *, owns_links: bool = False) -> SiteGroup:
        """Create a group of ranks at several sites."""
        return SiteGroup(
            options.store,
            self.links,
            ranks=ranks,
            position=options.group_rank,
            sites=[self._of_ranks[rank] for rank in ranks],
            timeout=options.timeout,
            inside=partial(gloo_group, options=options),
            owns_links=owns_links,
        )

    def close(self, *, linger_s: float = 5.0) -> None:
        """See `Job`."""
        self.links.close(linger_s=linger_s)


def default_group(options: Any, sites: Sites) -> SiteGroup:
    """Create the first group of a job over several sites, and wait until its links are connected.

    Raises:
        ChannelError: a link is not connected within ``comm.deadline_s``.
        ValueError: see `SiteLinks`.
    """
    links = SiteLinks(dist.PrefixStore("sites", options.store), sites, rank=options.group_rank)
    job = SitesJob(links)
    group = job.spanning(options, range(options.group_size), owns_links=True)
    group.job = job
    links.await_contact()
    return group
