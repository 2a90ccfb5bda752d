"""Comparison of this host's clock with the driver's: logs, deny-lists and certificates depend on it."""

from __future__ import annotations

import asyncio

from weft.conf.finding import Finding, Verdict
from weft.engine.supervision.clock import clock_offset
from weft.engine.supervision.control.address import Address

MOST_S = 1.0
"""Greatest offset in seconds that passes."""


def check_clock(driver: str, shift_s: float = 0.0) -> Finding:
    """Seconds between this host's clock and the driver's.

    Args:
        driver: ``HOST:PORT`` or the name of a Unix socket, or empty if there is no driver.
        shift_s: for tests: seconds by which to set this host's clock off.
    """
    if not driver:
        return Finding("clock", Verdict.does_not_apply, "no driver to compare with (--driver)")
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
