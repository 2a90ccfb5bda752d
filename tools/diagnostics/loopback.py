"""TCP on this host's loopback: throughput, and integrity of the data."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time

from weft.conf.host.diagnosis import CheckResult, Outcome
from weft.tools.diagnostics.judging import Judge

OWN_SHARE = 0.3
"""Minimum share of the best rate of this host."""
_PIECE, _PIECES = 1 << 20, 256
_MOST_S = 10.0


def check_loopback(judge: Judge, damage: bool = False) -> CheckResult:
    """Measure the gigabits that one connection carries per second of processor time.

    Other processes do not affect processor time.

    Args:
        damage: for tests: flip a bit of the data.
    """
    arrived: list[bool] = []

    def measure() -> float:
        rate, same = _transfer(os.urandom(_PIECE), damage)
        arrived.append(same)
        return rate

    try:
        result = judge.by_own_best("loopback", "TCP, by processor time", measure, share=OWN_SHARE, unit="Gbit/s")
    except OSError as error:
        return CheckResult("loopback", Outcome.failed, f"127.0.0.1: {error}")
    if not all(arrived):
        return CheckResult("loopback", Outcome.failed, "bytes arrived that had not been sent", result.figure, "Gbit/s")
    return result


def _transfer(piece: bytes, damage: bool) -> tuple[float, bool]:
    """Return the rate in 1e9 bits per second, and whether the last piece arrived unchanged."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_MOST_S)
        with socket.create_connection(listener.getsockname(), timeout=_MOST_S) as sender:
            receiver, _ = listener.accept()
            with receiver:
                receiver.settimeout(_MOST_S)
                room = bytearray(_PIECE)
                begun = time.process_time()
                feeding = threading.Thread(target=_send, args=(sender, piece), daemon=True)
                feeding.start()
                left = _PIECE * _PIECES
                while left:
                    at = (_PIECE * _PIECES - left) % _PIECE
                    got = receiver.recv_into(memoryview(room)[at:])
                    if not got:
                        raise ConnectionError("the connection ended early")
                    left -= got
                feeding.join()
                took = time.process_time() - begun
    if damage:
        room[_PIECE // 2] ^= 1
    same = hashlib.sha256(room).digest() == hashlib.sha256(piece).digest()
    return 8 * _PIECE * _PIECES / took / 1e9, same


def _send(sender: socket.socket, piece: bytes) -> None:
    try:
        for _ in range(_PIECES):
            sender.sendall(piece)
    except OSError:
        sender.close()  # the receiver sees it
