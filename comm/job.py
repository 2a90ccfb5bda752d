"""The job of the default process group: ranks at one site, at several sites, or emulated except for this one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch.distributed as dist

from weft.comm.links import Hop, SiteNetwork

T = TypeVar("T")


class GatherPurpose(Enum):
    """Kinds of small values that ranks exchange. Emulated ranks answer some kinds with values of their own."""

    value = "value"
    """Other values: every rank has the same as this one."""
    host = "host"
    """The host that a rank is on."""
    tied = "tied"
    """The parameters of a rank that others hold, too."""
    timeline = "timeline"
    """The timeline that a rank measured of a step."""


class Job:
    """A job of real ranks at one site. The default group's ``job`` may be a subclass.

    Attributes:
        is_real: False if all other ranks are emulated, so that nothing is measured.
        address: the address on which this host listens for all of its ranks, or None in a job without sites.
    """

    is_real = True
    address: tuple[str, int] | None = None

    # -- groups ------------------------------------------------------------------------------------

    def create_group(self, options: Any, inside: Callable[..., Any]) -> Any:
        """Create a process group, for `torch.distributed.Backend.register_backend`.

        Args:
            inside: creates a group inside a site from a store, this rank's position, the size and ``options``.
        """
        return inside(options.store, options.group_rank, options.group_size, options)

    def by_site(self, ranks: Iterable[int]) -> list[list[int]]:
        """Return the given global ranks of each site, ascending."""
        return [sorted(ranks)]

    def close(self, *, linger_s: float = 5.0) -> None:
        """Send queued data to other sites, for at most ``linger_s``. Groups across sites are unusable afterwards."""

    # -- small values --------------------------------------------------------------------------------

    def gather(
        self, exchange: Callable[[], list[Any]], value: Any, group: dist.ProcessGroup, purpose: GatherPurpose
    ) -> list[Any]:
        """Return the values of all members of ``group``. This rank's is ``value``. Real ranks call ``exchange``."""
        return exchange()

    def broadcast(self, exchange: Callable[[], Any], value: Any, src: int, kinds: Sequence[type]) -> Any:
        """Return rank ``src``'s value, which is ``value`` if this rank `computes` it. Real ranks call ``exchange``."""
        return exchange()

    def computes(self, src: int) -> bool:
        """True if this rank has to compute the value that rank ``src`` broadcasts next."""
        return dist.get_rank() == src

    # -- channels ------------------------------------------------------------------------------------

    def channels(self, connect: Callable[[], dict[Hop, Any]], hops: Collection[Hop]) -> dict[Hop, Any]:
        """Return this rank's ends of ``hops``. Real ranks call ``connect``."""
        return connect()

    def network(self, connect: Callable[[], SiteNetwork], hops: Collection[Hop]) -> SiteNetwork:
        """Return the links between sites for ``hops``. Real ranks call ``connect``."""
        return connect()


_AT_ONE_SITE = Job()


def current_job() -> Job:
    """Return the job of this process's default group."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return getattr(group, "job", _AT_ONE_SITE)
