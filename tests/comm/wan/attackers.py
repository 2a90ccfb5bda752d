"""Those who should not get in: what each tries at a rank's WAN port, and what it earns."""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from weft.comm.key import WanKey
from weft.comm.wan.library import load

Address = tuple[str, int]

_HELLO, _CHALLENGE, _PROOF = 88, 80, 32  # bytes; see comm/wan/handshake.hpp
_JOB = slice(8, 24)  # of a hello
_NOBODY = 9999  # a rank that the job does not have
_SINK = 0xFFFF  # a lane that is always open
_AT_ONCE = 500


def attack(address: Address, rank: int, recorded: Sequence[bytes], secret: bytes) -> int:
    """Try everything at the port of a rank.

    Args:
        recorded: what peers of the job have said when they came in.
        secret: the job's key, for the last attempt only.

    Returns:
        Ports that a scan of all found open.

    Raises:
        AssertionError: the port gave away more than a random number, or did not close.
    """
    assert _answer(address, os.urandom(200)) == 0
    assert _answer(address, _frame_of_4_gib()) == 0
    assert recorded, "no handshake was recorded"
    hello = _hello(rank, recorded[0][_JOB])
    assert _answer(address, hello, then=os.urandom(_PROOF) + _frame_of_4_gib()) == _CHALLENGE
    for said in recorded:
        assert _answer(address, said[:_HELLO], then=said[_HELLO:]) == _CHALLENGE
    _insider(address, hello, WanKey(secret))
    return _scan(address[0])


def _answer(address: Address, data: bytes, *, then: bytes = b"") -> int:
    """How many bytes the port says to ``data``, and to ``then``, before it closes."""
    heard = 0
    with socket.create_connection(address, timeout=10.0) as client, contextlib.suppress(ConnectionError):
        client.sendall(data)
        while more := client.recv(4096):
            heard += len(more)
            client.sendall(then)
            then = b""
    return heard


def _insider(address: Address, hello: bytes, key: WanKey) -> None:
    """Who has the key, and announces 4 GiB: it is cut off."""
    with socket.create_connection(address, timeout=10.0) as insider, contextlib.suppress(ConnectionError):
        insider.sendall(hello)
        challenge = insider.recv(_CHALLENGE, socket.MSG_WAITALL)
        insider.sendall(hmac.digest(key.derived("authentication"), b"connects" + hello + challenge, "sha256"))
        assert len(insider.recv(_PROOF, socket.MSG_WAITALL)) == _PROOF
        insider.sendall(_frame_of_4_gib())
        while insider.recv(4096):
            pass


def _hello(rank: int, job: bytes) -> bytes:
    fields = (_NOBODY, rank, 7, 0, 1, 128 << 10, 0)
    return struct.pack("<8s16sIIQIIII", b"weftwan2", job, *fields) + os.urandom(32)


def _frame_of_4_gib() -> bytes:
    """The header of a chunk of 4 GiB less one byte, in order but for that."""
    frame = struct.pack("<IHHQQQII48sI", 0x74666577, 1, _SINK, 0, 1 << 32, 0, 0xFFFFFFFF, 0, b"a", 0)
    return frame + struct.pack("<I", load().weft_wan_checksum(frame, len(frame)))


def _scan(host: str) -> int:
    """Connect to every port, and leave again; how many were open."""
    ports: Iterator[int] = iter(range(1, 65536))
    found = 0
    with selectors.DefaultSelector() as selector:
        while True:
            while len(selector.get_map()) < _AT_ONCE and (port := next(ports, 0)):
                one: Any = socket.socket()
                one.setblocking(False)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)  # some ports never answer
                one.connect_ex((host, port))
                selector.register(one, selectors.EVENT_WRITE)
            if not selector.get_map():
                return found
            for key, _ in selector.select(5.0):
                assert isinstance(key.fileobj, socket.socket)
                found += not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                selector.unregister(key.fileobj)
                key.fileobj.close()
