"""The job of the default process group, in what differs between jobs of one site, of several, and emulated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist


class Job:
    """A job whose ranks are at one site. Subclasses are `pg_options` of the first group, which has them as ``job``.

    Attributes:
        address: the address on which this host listens for all of its ranks, or None in a job without sites.
    """

    address: tuple[str, int] | None = None

    def by_site(self, ranks: Iterable[int]) -> list[list[int]]:
        """The given global ranks of each site, ascending."""
        return [sorted(ranks)]

    def group(self, options: Any, inside: Callable[..., Any]) -> Any:
        """Create a process group, for `torch.distributed.Backend.register_backend`.

        Args:
            inside: creates a group of a site's ranks, of a store, a position, a size and ``options``.
        """
        return inside(options.store, options.group_rank, options.group_size, options)

    def close(self, *, linger_s: float = 5.0) -> None:
        """Send queued data to other sites, for at most ``linger_s``; their groups are unusable afterwards."""


_AT_ONE_SITE = Job()


def current_job() -> Job:
    """The job of this process's default group."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return getattr(group, "job", _AT_ONE_SITE)
