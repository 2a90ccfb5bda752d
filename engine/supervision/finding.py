"""Results of a host's checks, and how the supervisor runs `weft doctor node`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

DOCTOR = "weft.tools.doctor:main"
"""The module that checks a host: it loads torch, and has to run in its own process."""


class Verdict(Enum):
    """The result of a check of a host."""

    passed = "passed"
    failed = "failed"
    does_not_apply = "does not apply"


@dataclass(frozen=True)
class Finding:
    """A check's result.

    Attributes:
        check: name of the check.
        verdict: whether the host may work.
        says: one line, for people and for the deny-list.
        figure: what was measured; None where nothing is.
        unit: of ``figure``.
        least: the least ``figure`` that passes; None where it is not judged by one.
    """

    check: str
    verdict: Verdict
    says: str
    figure: float | None = None
    unit: str = ""
    least: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "verdict": self.verdict.value}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Finding:
        """Return the result that `as_dict` converted."""
        return cls(**{**fields, "verdict": Verdict(fields["verdict"])})


def failures(findings: Sequence[Finding]) -> list[Finding]:
    """Those for which a host is to be evicted."""
    return [finding for finding in findings if finding.verdict is Verdict.failed]


def doctor_arguments(folder: Path, *, ranks: int, driver: str = "", cache: Path | None = None) -> list[str]:
    """Return the arguments with which `DOCTOR` checks this host and prints the results as JSON.

    Args:
        folder: the run's, whose disk is checked.
        ranks: of this host.
        driver: ``HOST:PORT`` or a Unix socket's path, to compare clocks with; empty leaves that out.
        cache: of what this host did before; None takes the usual one.
    """
    arguments = ["node", "--json", "--folder", str(folder), "--ranks", str(ranks)]
    return [*arguments, *(["--driver", driver] if driver else []), *(["--cache", str(cache)] if cache else [])]


def read_findings(output: str, code: int | None) -> list[Finding]:
    """The findings in what `DOCTOR` has printed; a doctor that did not end well is a finding of its own.

    Args:
        code: exit status; None if it was given up.
    """
    try:
        return [Finding.from_dict(fields) for fields in json.loads(output)]
    except (ValueError, TypeError, KeyError):
        said = " ".join(output.split())[-200:]
        ended = "did not end in time" if code is None else f"ended with {code}"
        return [Finding("doctor", Verdict.failed, f"the doctor {ended}: {said}" if said else f"the doctor {ended}")]
