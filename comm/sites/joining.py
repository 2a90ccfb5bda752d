"""The backend of torch.distributed for jobs over several hosts: sealed gloo or NCCL in a site, `SiteGroup` across."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist

from weft.comm import rendezvous
from weft.comm.sites.group import SiteGroup
from weft.comm.sites.links import SiteLinks, Sites
from weft.comm.sites.sealing import sealed_afterwards

GLOO = "weft_gloo"
"""Backend whose groups inside a site are gloo's."""
NCCL = "weft_nccl"
"""Backend whose groups inside a site are NCCL's."""
_DEVICES = ["cpu", "cuda"]


def backend_of(inside: str) -> str:
    """The backend for a job over several hosts, where that of a site is ``inside``: gloo or nccl.

    Once it is the job's, every group that `torch.distributed.new_group` creates, for any caller, is one of
    ``inside`` if its ranks are of one site, and a `SiteGroup` otherwise. A job that was not made with `Sites`
    is of one site. Groups of gloo accept no connection once they stand.
    """
    name = {"gloo": GLOO, "nccl": NCCL}[inside]
    if name.upper() not in dist.Backend._plugins:
        create = partial(_create, inside=_MAKERS[inside])
        dist.Backend.register_backend(name, create, extended_api=True, devices=_DEVICES)
    return name


def spans_sites() -> bool:
    """True if the job's process group was made for several sites."""
    return isinstance(dist.group.WORLD, SiteGroup)


def by_site(ranks: Iterable[int]) -> list[list[int]]:
    """The given global ranks of each site, ascending; all of them in a job that was not made for several sites."""
    of_ranks = dist.distributed_c10d._get_default_group().links.sites.of_ranks if spans_sites() else None
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(of_ranks[rank] if of_ranks else 0, []).append(rank)
    return [found[site] for site in sorted(found)]


def door() -> tuple[str, int] | None:
    """Return the address on which this host listens for all of its ranks, or None in a job without sites."""
    return dist.distributed_c10d._get_default_group().links.address if spans_sites() else None


def leave() -> None:
    """Deliver queued messages to other sites, before the process ends without cleaning up."""
    if dist.is_initialized() and spans_sites():
        dist.distributed_c10d._get_default_group().links.close()


def interrupt_groups() -> None:
    """Fail the waits of groups over several sites, from any thread; the groups are unusable afterwards."""
    if dist.is_initialized() and spans_sites():
        dist.distributed_c10d._get_default_group().links.close(linger_s=0.0)


def in_host_memory(backend: str) -> str:
    """Return the backend for tensors in host memory in a job whose backend is ``backend``."""
    return backend_of("gloo") if rendezvous.made_here() or backend in (GLOO, NCCL) else "gloo"


def _create(options: Any, given: Any, *, inside: Callable[..., Any]) -> Any:
    """Create a group, for `torch.distributed.Backend.register_backend`; ``given`` are the first group's `Sites`."""
    store, ranks, me = options.store, options.global_ranks_in_group, options.group_rank
    first = isinstance(given, Sites)
    if not first and not spans_sites():
        return inside(store, me, options.group_size, options)
    if first:
        ranks = list(range(options.group_size))
        links = SiteLinks(dist.PrefixStore("sites", store), given, rank=me)
    else:
        default = dist.distributed_c10d._get_default_group()
        ranks, links = ranks or list(range(default.size())), default.links
    of_members = [links.sites.of_ranks[rank] for rank in ranks]
    if len(set(of_members)) == 1:
        return inside(store, me, len(ranks), options)
    group = SiteGroup(
        store,
        links,
        ranks=ranks,
        position=me,
        sites=of_members,
        timeout=options.timeout,
        inside=partial(_gloo, options=options),
        owns_links=first,
    )
    if first:
        links.await_contact()
    return group


def _gloo(store: dist.Store, rank: int, size: int, options: Any) -> Any:
    with sealed_afterwards():
        group = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    group._set_sequence_number_for_group()
    return group


def _nccl(store: dist.Store, rank: int, size: int, options: Any) -> Any:
    settings = dist.ProcessGroupNCCL.Options()
    settings._timeout = options.timeout
    settings.global_ranks_in_group = options.global_ranks_in_group
    settings.group_name = options.group_id
    group = dist.ProcessGroupNCCL(store, rank, size, settings)
    group._set_sequence_number_for_group()
    return group


_MAKERS = {"gloo": _gloo, "nccl": _nccl}
