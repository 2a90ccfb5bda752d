"""Offset between the driver's clock and a host's, measured by requests over the control wire."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weft.engine.supervision.control import ControlClient
from weft.engine.supervision.control.address import Address

ASKER = "clock of "
"""Prefix of the names of peers that only request the time and are no agents."""
_SAMPLES = 8


def answer_clock(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the driver's answer to a request of `clock_offset`, or None for other messages."""
    asked = message.get("clock")
    return {"clock": asked, "at": time.time()} if isinstance(asked, int) else None


async def clock_offset(address: Address, most_s: float = 5.0) -> tuple[float, float]:
    """Return the seconds by which this host's clock is ahead of the driver's, and the largest error of that.

    The answer with the shortest round trip is used. Its error is at most half of that round trip.

    Raises:
        ValueError: a TCP address and no ``WEFT_KEY``.
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
