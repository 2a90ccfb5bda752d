"""Listening sockets that accept nobody once a process group stands."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: keep 0 bytes of any packet

log = logging.getLogger(__name__)


@contextmanager
def sealed_afterwards() -> Iterator[None]:
    """Have the listening sockets that the block opens accept no connection after it.

    gloo connects all members of a group when the group is made, takes whoever names the right number, and
    listens as long as the group lives. In this process nothing else may begin to listen meanwhile.
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
