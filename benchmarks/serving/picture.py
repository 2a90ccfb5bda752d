"""The picture: the computations of ranks with prefills between them, over two steps (BubbleTea figure 13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.serving.figures import length_s
from benchmarks.serving.training import Cell
from weft.inference.board.common_bubbles import Spans, intersection

COLOURS = {
    "F": ("#3f8fd2", "forward"),
    "B": ("#c46a12", "backward, both gradients"),
    "I": ("#f0ad2f", "backward, input gradient"),
    "W": ("#4faf6a", "weight gradient"),
    "STEP": ("#7b8794", "optimiser"),
    "prefill": ("#d64545", "prefill"),
}
"""Colour and name of each operation."""


def draw(
    path: Path,
    cells: Mapping[int, Sequence[Cell]],
    work: Mapping[int, Spans],
    prefills: Mapping[int, Spans],
    steps: Spans,
    windows: Spans,
) -> None:
    """Draw two steps of ``windows``: those with most prefill on the rank that has least.

    Args:
        cells: computations by rank.
        work: busy times from each rank's board; in them the optimiser's step includes waiting for other ranks.
        prefills: prefill steps by rank.
        steps: begin and end of each training step.
    """
    from matplotlib.figure import Figure

    first, second = _best(cells, prefills, steps, windows)
    low_s, high_s = first[0], second[1]
    figure = Figure(figsize=(13, 1.2 + 0.8 * len(cells)), dpi=110, facecolor="white")
    axes = figure.add_subplot()
    labelled: set[str] = set()
    for row, rank in enumerate(sorted(cells)):
        drawn = [cell for cell in cells[rank] if cell.end_s > low_s and cell.start_s < high_s]
        bars = [(cell.op, span) for cell in drawn for span in intersection([(cell.start_s, cell.end_s)], work[rank])]
        bars += [("prefill", span) for span in prefills[rank]]
        for op, span in bars:
            for start_s, end_s in intersection([span], [(low_s, high_s)]):
                colour, name = COLOURS[op]
                label = "" if op in labelled else name
                labelled.add(op)
                place = [(start_s - low_s, end_s - start_s)]
                axes.broken_barh(place, (row - 0.4, 0.8), color=colour, linewidth=0, label=label)
    axes.axvline(second[0] - low_s, color="#1f2933", linewidth=1, linestyle=(0, (3, 2)))
    axes.set_yticks(range(len(cells)), [f"rank {rank}" for rank in sorted(cells)])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("seconds; the dashed line is where a step ends and the next begins")
    axes.set_xlim(0, high_s - low_s)
    figure.legend(loc="upper center", ncols=len(labelled), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _best(
    cells: Mapping[int, Sequence[Cell]], prefills: Mapping[int, Spans], steps: Spans, windows: Spans
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return two consecutive steps with most prefill, both recorded and within a window."""
    known_s = max(found[0].start_s for found in cells.values())
    whole = [pair for pair in pairwise(steps) if pair[0][0] >= known_s]
    busy = [pair for pair in whole if any(low <= pair[0][0] and pair[1][1] <= high for low, high in windows)] or whole
    return max(busy, key=lambda pair: min(length_s(intersection(spans, pair)) for spans in prefills.values()))
