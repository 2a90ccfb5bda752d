"""Results of a host's checks, and the supervisor's call of `weft doctor node`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

DOCTOR = "weft.tools.doctor:main"
"""Function that checks a host. It loads torch and must run in its own process."""


class Outcome(Enum):
    """The outcome of a check of a host."""

    passed = "passed"
    failed = "failed"
    does_not_apply = "does not apply"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of a host.

    Attributes:
        text: one line of text, for output and for the deny-list.
        figure: measured value, or None if the check measures nothing.
        unit: unit of ``figure``.
        least: the lowest ``figure`` that passes, or None if there is no threshold.
    """

    check: str
    outcome: Outcome
    text: str
    figure: float | None = None
    unit: str = ""
    least: float | None = None


def failures(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the failed results, which exclude a host from runs."""
    return [result for result in results if result.outcome is Outcome.failed]


def doctor_arguments(folder: Path, *, ranks: int, driver: str = "", cache: Path | None = None) -> list[str]:
    """Return the arguments with which `DOCTOR` checks this host and prints the results as JSON.

    Args:
        folder: the run's folder, whose disk is checked.
        ranks: number of ranks of this host.
        driver: ``HOST:PORT`` or a Unix socket's path, to compare clocks. An empty string skips this.
        cache: folder with earlier measurements of this host. None uses the default folder.
    """
    arguments = ["node", "--json", "--folder", str(folder), "--ranks", str(ranks)]
    return [*arguments, *(["--driver", driver] if driver else []), *(["--cache", str(cache)] if cache else [])]


def read_results(output: str, code: int | None) -> list[CheckResult]:
    """Return the results that `DOCTOR` has printed. If it has failed, return a failed result with the reason.

    Args:
        code: its exit code, or None after a timeout.
    """
    try:
        return msgspec.json.decode(output, type=list[CheckResult])
    except (msgspec.MsgspecError, UnicodeError):
        said = " ".join(output.split())[-200:]
        ended = "did not end in time" if code is None else f"ended with {code}"
        return [CheckResult("doctor", Outcome.failed, f"the doctor {ended}: {said}" if said else f"the doctor {ended}")]
