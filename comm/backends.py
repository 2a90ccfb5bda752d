"""Backends of torch.distributed for the job's groups: gloo that is sealed, or NCCL, inside of each site."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from weft.comm import rendezvous
from weft.comm.job import current_job
from weft.comm.links import Sites
from weft.conf.features import entry

GLOO = "weft_gloo"
"""Backend whose groups inside a site are gloo's."""
NCCL = "weft_nccl"
"""Backend whose groups inside a site are NCCL's."""
_DEVICES = ["cpu", "cuda"]
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: keep 0 bytes of any packet

log = logging.getLogger(__name__)


def backend_of(inside: str) -> str:
    """The backend for a job over several hosts, where that of a site is ``inside``: gloo or nccl.

    Once it is the job's, every group that `torch.distributed.new_group` creates, for any caller, is one of
    ``inside`` if its ranks are of one site. A job that was not made with `Sites` is of one site. Groups of gloo
    accept no connection once they stand.
    """
    name = {"gloo": GLOO, "nccl": NCCL}[inside]
    if name.upper() not in dist.Backend._plugins:
        create = partial(create_group, inside={"gloo": gloo_group, "nccl": _nccl}[inside])
        dist.Backend.register_backend(name, create, extended_api=True, devices=_DEVICES)
    return name


def in_host_memory(backend: str) -> str:
    """Return the backend for tensors in host memory in a job whose backend is ``backend``."""
    return backend_of("gloo") if rendezvous.made_here() or backend in (GLOO, NCCL) else "gloo"


def create_group(options: Any, given: Any, *, inside: Callable[..., Any]) -> Any:
    """Create a group, for `torch.distributed.Backend.register_backend`; ``given`` are the first group's `Sites`."""
    if isinstance(given, Sites):
        return entry("wan").default_group(options, given)
    return current_job().create_group(options, inside)


def gloo_group(store: dist.Store, rank: int, size: int, options: Any) -> Any:
    """Create a group of gloo that accepts no connection once it stands."""
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


@contextmanager
def sealed_afterwards() -> Iterator[None]:
    """Drop new connections to the listening sockets that the block opens, once it has ended.

    gloo connects all members of a group when the group is created, accepts any peer that sends the right number, and
    listens as long as the group exists. Nothing else in this process may begin to listen during the block.
    """
    before = _sockets()
    yield
    for file in _sockets().items() - before.items():
        with suppress(OSError), socket.socket(fileno=os.dup(file[0])) as end:
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _seal(end)


def _seal(listener: socket.socket) -> None:
    code = ctypes.create_string_buffer(_DROP_ALL)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))
    except OSError as error:
        log.warning("%s:%d goes on accepting connections of anybody: %s", *listener.getsockname()[:2], error)


def _sockets() -> dict[int, str]:
    """The sockets of this process: the descriptor, and the kernel's name of the socket behind it."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                found[int(name)] = target
    return found
