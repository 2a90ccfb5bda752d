"""Examination of hosts on which ranks keep failing: `weft doctor node` runs there between two attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.conf.finding import DOCTOR, doctor_arguments, failures, read_findings
from weft.engine.supervision.control.address import Address
from weft.engine.supervision.faults import FaultKind
from weft.engine.supervision.ranks import Ranks

SUSPICIOUS = 2
"""Number of faults of a host after which it is examined. The count starts again then."""
DOCTOR_S = 60.0
"""Timeout of an examination in seconds. A host that exceeds it has failed."""
_OF_OTHERS = (FaultKind.lost_peer.value, FaultKind.disk_full.value, FaultKind.checkpoint.value)
"""Faults that do not count, because the host is not the cause or the cause is known."""


class Suspicions:
    """Counts the faults of each host."""

    def __init__(self) -> None:
        """Start without faults."""
        self._faults: Counter[str] = Counter()

    def saw_fault(self, kind: str, culprit: Mapping[str, Any]) -> None:
        """Count a fault for its hosts."""
        if kind not in _OF_OTHERS:
            self._faults.update([culprit["host"]] if "host" in culprit else culprit.get("hosts", ()))

    def take(self) -> str | None:
        """Return a host to examine and reset its count, or None if there is none."""
        host = next((host for host, count in self._faults.items() if count >= SUSPICIOUS), None)
        if host is not None:
            del self._faults[host]
        return host


async def examine(ranks: Ranks, run_folder: Path, slots: int, driver: Address) -> list[str]:
    """Run `weft doctor node` on this host, and return its failed checks, one line each.

    Args:
        ranks: the host's ranks. Their forkserver has already imported the modules that a doctor needs.
        slots: number of ranks of this host.
    """
    where = "" if isinstance(driver, str) else "{}:{}".format(*driver)  # a driver on this machine has the same clock
    arguments = doctor_arguments(run_folder, ranks=slots, driver=where)
    printed, code = await ranks.ask("doctor", DOCTOR, arguments, DOCTOR_S)
    return [f"{finding.check}: {finding.says}" for finding in failures(read_findings(printed, code))]


def reason_to_evict(failed: Sequence[str]) -> str:
    """Return the reason for the deny-list."""
    return f"weft doctor node: {'; '.join(failed)}"
