"""Outcome of a fault, and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMED_WITHIN_S = 10.0
NEXT_STEP_WITHIN_S = 30.0
ROUNDING = 1e-3
"""Maximum relative difference of losses whose sums have another order."""


@dataclass
class Survival:
    """The outcome of a fault.

    Attributes:
        culprit: the culprit in the journal; ``right`` is True if it is correct.
        named_s: seconds until the culprit was named.
        next_step_s: seconds from the fault, or from when training could continue, to the next good step. If training
            never has to stop, the longest step meanwhile.
        lost: steps that were trained again.
        difference: the largest relative difference of a loss, until the next fault, from an undisturbed run. None if no
            loss was compared.
        rounds: True if sums are made in another order than in the undisturbed run.
    """

    fault: str
    culprit: str = "-"
    right: bool = False
    named_s: float | None = None
    next_step_s: float | None = None
    lost: int | None = None
    difference: float | None = None
    rounds: bool = False
    ends: bool = False
    note: str = ""

    @property
    def equal(self) -> bool:
        """True if the losses equal those of an undisturbed run, up to rounding if sums have another order."""
        return self.difference is not None and self.difference <= (ROUNDING if self.rounds else 0.0)

    @property
    def met(self) -> bool:
        """True if the culprit, the losses and the times are as required."""
        in_time = (self.named_s or 0.0) <= NAMED_WITHIN_S and (self.next_step_s or 0.0) <= NEXT_STEP_WITHIN_S
        return self.right and self.equal and in_time and not self.note

    @property
    def row(self) -> dict[str, object]:
        """The row of the table."""
        return {
            "fault": self.fault,
            "blamed": self.note or self.culprit,
            "right": "yes" if self.right else "NO",
            "named after s": _seconds(self.named_s),
            "next good step after s": "the run ends" if self.ends and self.right else _seconds(self.next_step_s),
            "steps lost": "-" if self.lost is None else self.lost,
            "losses equal": self._losses,
        }

    @property
    def _losses(self) -> str:
        if self.difference is None:
            return "-"
        if not self.difference:
            return "yes"
        return f"{'to' if self.equal else 'NO:'} {self.difference:.1g}"


def is_right(said: Mapping[str, Any], blamed: Mapping[str, Any], host_of: Mapping[int, str]) -> bool:
    """Return True if a journal's culprit and kind match ``blamed``. See `Inflicted`."""
    for name, wanted in blamed.items():
        match name:
            case "site":
                right = str(said.get("host", "")).startswith(wanted)
            case "between":
                hosts = [host_of.get(rank, "") for rank in said.get("link", ())] or [said.get("host", "")]
                sites = [host.rstrip("0123456789") for host in hosts]
                # A driver that cannot reach any host of a site does not know whether the site or the line has failed.
                right = set(sites) == set(wanted) or sites == [wanted[1]]
            case _:
                right = said.get(name) == wanted
        if not right:
            return False
    return True


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
