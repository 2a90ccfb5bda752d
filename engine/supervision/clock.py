"""The driver's clock alongside a host's own, by questions and answers over the control wire."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weft.comm.control import ControlClient
from weft.comm.control.address import Address

ASKER = "clock of "
"""Beginning of the name of a peer that only asks for the time; it is no agent."""
_SAMPLES = 8


def answer_clock(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the driver's answer to `clock_offset`'s question; None for other messages."""
    asked = message.get("clock")
    return {"clock": asked, "at": time.time()} if isinstance(asked, int) else None


async def clock_offset(address: Address, most_s: float = 5.0) -> tuple[float, float]:
    """Seconds by which this host's clock is ahead of the driver's, and the most by which that may be wrong.

    The answer of the shortest round trip counts; it was given somewhere within it.

    Raises:
        ValueError: a TCP address and no ``WEFT_KEY``.
        TimeoutError: nobody answers in ``most_s`` seconds.
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
