"""Choice of a free port that stays free until a process listens on it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST, _HIGHEST = 10_000, 65_535
"""Ports below the lowest are used by well-known services."""
_TRIES = 100


def free_port() -> int:
    """Return a TCP port on which no process listens on this host.

    The kernel assigns its ephemeral ports to connections all the time, so one of them could be used before a process
    listens on it. Therefore this is one of the other ports, chosen at random.

    Raises:
        OSError: no free port was found.
    """
    ephemeral = _ephemeral()
    ours = [port for port in range(_LOWEST, _HIGHEST + 1) if port not in ephemeral]
    chooser = random.SystemRandom()
    for _ in range(_TRIES):
        port = chooser.choice(ours) if ours else 0
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError(f"no free port found in {_TRIES} tries; name one by cluster.master_port")


def _ephemeral() -> range:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:  # not Linux
        return range(32_768, _HIGHEST + 1)
    return range(int(low), int(high) + 1)
