"""Access to listeners of gloo and NCCL: only this user's processes connect, and none after a group is created."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from weft.comm.native import Kind, build

_SOURCE = Path(__file__).with_name("own_user.c")
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: keep 0 bytes of any packet

log = logging.getLogger(__name__)


def refuse_other_users(*, one_host: bool) -> None:
    """Close connections of other users at every listener of the loaded libraries of torch, NCCL, ZeroMQ, UCX.

    Listeners that they open later are included. It may be called again, when more libraries are loaded. Without a C
    compiler, or on a kernel that does not report the owner of a connection, a warning is logged.

    Args:
        one_host: also refuse connections from other hosts, because no rank is there.
    """
    try:
        redirected = _library().weft_refuse_other_users(one_host)
    except (ValueError, OSError) as error:
        _warn(str(error).partition("\n")[0])
        return
    if not redirected:
        _warn("the kernel does not tell whose a connection is (enable INET_DIAG)")


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build([_SOURCE], kind=Kind.library)))


@cache
def _warn(reason: str) -> None:
    log.warning("other users of this host can connect to ranks while process groups are made: %s", reason)


@contextmanager
def sealed_afterwards() -> Iterator[None]:
    """After the block, drop new connections to the listening sockets that it opened.

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


def _sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets by descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK((status := os.fstat(int(name))).st_mode):
                found[int(name)] = status.st_ino
    return found
