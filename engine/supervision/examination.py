"""Examination of hosts on which ranks keep failing: `weft doctor node` runs there between two attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.comm.control.address import Address
from weft.engine.supervision.faults import FaultKind
from weft.engine.supervision.finding import DOCTOR, doctor_arguments, failures, read_findings
from weft.engine.supervision.ranks import Ranks

SUSPICIOUS = 2
"""Faults of a host after which it is examined, and again after as many more."""
DOCTOR_S = 60.0
"""Seconds that an examination may take; a host on which it takes longer has failed it."""
_OF_OTHERS = (FaultKind.lost_peer.value, FaultKind.disk_full.value, FaultKind.checkpoint.value)
"""Faults for which a host is not to blame, or whose reason is known."""


class Suspicions:
    """Counts the faults of each host."""

    def __init__(self) -> None:
        """Nobody is suspected."""
        self._faults: Counter[str] = Counter()

    def saw_fault(self, kind: str, culprit: Mapping[str, Any]) -> None:
        """A fault has been found."""
        if kind not in _OF_OTHERS:
            self._faults.update([culprit["host"]] if "host" in culprit else culprit.get("hosts", ()))

    def take(self) -> str | None:
        """A host to examine, which then counts as if nothing had happened; None if there is none."""
        host = next((host for host, count in self._faults.items() if count >= SUSPICIOUS), None)
        if host is not None:
            del self._faults[host]
        return host


async def examine(ranks: Ranks, run_folder: Path, slots: int, driver: Address) -> list[str]:
    """Have `weft doctor node` look at this host; returns what it found wrong, a line each.

    Args:
        ranks: whose forkserver has imported already what takes a doctor longer than the checks.
        slots: of this host.
    """
    where = "" if isinstance(driver, str) else "{}:{}".format(*driver)  # a driver on this machine has its clock
    arguments = doctor_arguments(run_folder, ranks=slots, driver=where)
    printed, code = await ranks.ask("doctor", DOCTOR, arguments, DOCTOR_S)
    return [f"{finding.check}: {finding.says}" for finding in failures(read_findings(printed, code))]


def reason_to_evict(failed: Sequence[str]) -> str:
    """The line for the deny-list."""
    return f"weft doctor node: {'; '.join(failed)}"
