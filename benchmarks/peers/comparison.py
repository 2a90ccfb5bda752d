"""The table of engines that all comparisons share: measured steps and their references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.case import middle_and_spread
from benchmarks.results import show
from weft.tools.tables import table_of


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The steps of an engine on a case.

    Attributes:
        engine: name of the engine in the registry.
        title: name of the engine in the table.
        case: title of the table.
        step_s: seconds of every step, of all rounds.
        references: seconds with which a step is compared, by name, or None if the engine does not report them.
        ratios: names of the references for which the table has a ratio.
        compared_s: seconds that are compared with the references; None takes the median step.
        notes: further cells, by column.
    """

    engine: str
    title: str
    case: str
    step_s: tuple[float, ...]
    references: Mapping[str, float | None]
    ratios: tuple[str, ...] = ()
    compared_s: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Median step."""
        return middle_and_spread(self.step_s)[0]

    def over(self, reference: str) -> float | None:
        """Return the measured seconds divided by the reference, or None without the reference."""
        seconds = self.references[reference]
        return None if seconds is None else (self.compared_s or self.median_s) / seconds


def show_steps(rows: Sequence[Measured], title: str = "") -> None:
    """Print a table per case with a row per engine."""
    if title:
        show(title)
    for case in dict.fromkeys(row.case for row in rows):
        here = [row for row in rows if row.case == case]
        best_s = min(row.median_s for row in here)
        show(table_of((_cells(row, best_s) for row in here), f"{case}; milliseconds"))


def _cells(row: Measured, best_s: float) -> dict[str, str]:
    ratios = {name: row.over(name) for name in row.ratios}
    return {
        "engine": row.title,
        **{name: "" if seconds is None else f"{1e3 * seconds:.0f}" for name, seconds in row.references.items()},
        "step": f"{1e3 * row.median_s:.0f}",
        "spread": f"{middle_and_spread(row.step_s)[1]:.1%}",
        **{f"/ {name}": "" if ratio is None else f"{ratio:.3f}" for name, ratio in ratios.items()},
        **row.notes,
        "/ best": f"{row.median_s / best_s:.2f}x best",
    }
