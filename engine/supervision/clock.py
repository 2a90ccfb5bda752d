"""Offset between the driver's clock and a host's, measured by requests over the control wire."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weft.comm.authenticated_socket import Address
from weft.conf.host.diagnosis import Finding, Verdict
from weft.engine.supervision.control import ControlClient

ASKER = "clock of "
"""Prefix of the names of peers that only request the time and are no agents."""
_SAMPLES = 8
MOST_S = 1.0
"""Greatest offset in seconds that passes."""


def answer_clock(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the driver's answer to a request of `clock_offset`, or None for other messages."""
    asked = message.get("clock")
    return {"clock": asked, "at": time.time()} if isinstance(asked, int) else None


async def clock_offset(address: Address, most_s: float = 5.0) -> tuple[float, float]:
    """Return the seconds by which this host's clock is ahead of the driver's, and the maximum error of this value.

    The answer with the shortest round trip is used. Its error is at most half of that round trip.

    Raises:
        ValueError: the address is a TCP address, and ``WEFT_KEY`` is not set.
        TimeoutError: no answer in ``most_s`` seconds.
    """
    answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    name = f"{ASKER}{socket.gethostname()} {os.getpid()}"
    client = ControlClient(address, name=name, on_message=answers.put_nowait)
    client.start()
    offset, uncertain = 0.0, float("inf")
    try:
        async with asyncio.timeout(most_s):
            for number in range(_SAMPLES):
                asked = time.time()
                client.send({"clock": number})
                while (answer := await answers.get()).get("clock") != number:
                    pass
                heard = time.time()
                if (heard - asked) / 2 < uncertain:
                    uncertain = (heard - asked) / 2
                    offset = (asked + heard) / 2 - float(answer["at"])
    finally:
        with suppress(Exception):
            await client.close()
    return offset, uncertain


def check_clock(driver: str, shift_s: float = 0.0) -> Finding:
    """Check the difference between this host's clock and the driver's.

    Args:
        driver: ``HOST:PORT`` or the name of a Unix socket.
        shift_s: seconds to add to this host's clock, for tests.
    """
    try:
        offset, uncertain = asyncio.run(clock_offset(_address(driver)))
    except (TimeoutError, OSError) as error:
        return Finding("clock", Verdict.failed, f"the driver at {driver} does not answer {error}".strip())
    offset += shift_s
    verdict = Verdict.passed if abs(offset) - uncertain <= MOST_S else Verdict.failed
    side = "ahead of" if offset >= 0 else "behind"
    says = f"{abs(offset) * 1e3:.1f} ms {side} the driver's, to {uncertain * 1e3:.1f} ms"
    return Finding("clock", verdict, says, offset, "s")


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else text
