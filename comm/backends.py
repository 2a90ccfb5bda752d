"""Backends of torch.distributed for the job's groups: inside a site, NCCL or a gloo that refuses late connections."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from weft.comm import rendezvous
from weft.comm.job import current_job
from weft.comm.links import Sites
from weft.comm.listeners import sealed_afterwards
from weft.conf.features import entry

GLOO = "weft_gloo"
"""Backend whose groups inside a site are gloo's."""
NCCL = "weft_nccl"
"""Backend whose groups inside a site are NCCL's."""
_DEVICES = ["cpu", "cuda"]

log = logging.getLogger(__name__)


def backend_of(inside: str) -> str:
    """Return the backend for a job over several hosts. ``inside`` (gloo or nccl) is the backend inside each site.

    `torch.distributed.new_group` then creates a group of ``inside`` if all its ranks are at one site, for any caller. A
    job without `Sites` is one site. After a gloo group is created, it accepts no further connections.
    """
    name = {"gloo": GLOO, "nccl": NCCL}[inside]
    if name.upper() not in dist.Backend._plugins:
        create = partial(create_group, inside={"gloo": gloo_group, "nccl": _nccl}[inside])
        dist.Backend.register_backend(name, create, extended_api=True, devices=_DEVICES)
    return name


def in_host_memory(backend: str) -> str:
    """Return the backend for tensors in host memory in a job whose backend is ``backend``."""
    return backend_of("gloo") if rendezvous.made_here() or backend in (GLOO, NCCL) else "gloo"


def on_host(group: dist.ProcessGroup | None = None) -> bool:
    """True if the group communicates from host memory (gloo, which connects when the group is created)."""
    return not current_job().is_real or dist.get_backend(group) in ("gloo", GLOO)


def create_group(options: Any, given: Any, *, inside: Callable[..., Any]) -> Any:
    """Create a group, for `torch.distributed.Backend.register_backend`. ``given`` is `Sites` for the first group."""
    if isinstance(given, Sites):
        return entry("wan").default_group(options, given)
    return current_job().create_group(options, inside)


def gloo_group(store: dist.Store, rank: int, size: int, options: Any) -> Any:
    """Create a gloo group that accepts no connections after its creation."""
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
