"""Results of a host's checks, and how the supervisor runs `weft doctor node`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

DOCTOR = "weft.tools.doctor:main"
"""The module that checks a host. It loads torch and must run in its own process."""


class Verdict(Enum):
    """The result of a check of a host."""

    passed = "passed"
    failed = "failed"
    does_not_apply = "does not apply"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        says: one line, for output and for the deny-list.
        figure: measured value, or None if the check measures nothing.
        unit: of ``figure``.
        least: the least ``figure`` that passes, or None if there is no threshold.
    """

    check: str
    verdict: Verdict
    says: str
    figure: float | None = None
    unit: str = ""
    least: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return {**asdict(self), "verdict": self.verdict.value}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Finding:
        """Return the result that `as_dict` converted."""
        return cls(**{**fields, "verdict": Verdict(fields["verdict"])})


def failures(findings: Sequence[Finding]) -> list[Finding]:
    """Return the results that evict a host."""
    return [finding for finding in findings if finding.verdict is Verdict.failed]


def doctor_arguments(folder: Path, *, ranks: int, driver: str = "", cache: Path | None = None) -> list[str]:
    """Return the arguments with which `DOCTOR` checks this host and prints the results as JSON.

    Args:
        folder: the run's, whose disk is checked.
        ranks: number of ranks of this host.
        driver: ``HOST:PORT`` or a Unix socket's path, to compare clocks with. Empty leaves that out.
        cache: earlier measurements of this host. None takes the default folder.
    """
    arguments = ["node", "--json", "--folder", str(folder), "--ranks", str(ranks)]
    return [*arguments, *(["--driver", driver] if driver else []), *(["--cache", str(cache)] if cache else [])]


def read_findings(output: str, code: int | None) -> list[Finding]:
    """Return the results that `DOCTOR` has printed. A failure of the doctor itself is one more result.

    Args:
        code: exit status, or None after a timeout.
    """
    try:
        return [Finding.from_dict(fields) for fields in json.loads(output)]
    except (ValueError, TypeError, KeyError):
        said = " ".join(output.split())[-200:]
        ended = "did not end in time" if code is None else f"ended with {code}"
        return [Finding("doctor", Verdict.failed, f"the doctor {ended}: {said}" if said else f"the doctor {ended}")]
