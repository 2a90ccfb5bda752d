"""Two ranks over two steps, training and prefill in one row each, as in BubbleTea's figure 13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from weft.inference.common_bubbles import Spans, intersection
from weft.tools.bubbles.reckoning import length_s
from weft.tools.bubbles.training import Cell

COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b", "STEP": "#888888", "prefill": "#d62728"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "STEP": "optimiser"}


def draw(
    path: Path,
    cells: Mapping[int, Sequence[Cell]],
    work: Mapping[int, Spans],
    prefills: Mapping[int, Spans],
    steps: Spans,
    windows: Spans,
) -> None:
    """Draw the two steps of ``windows`` in which the rank with the least prefill had the most.

    Args:
        cells: computations by rank.
        work: what each rank's board says: the optimiser's step waits for other ranks in between.
        prefills: prefill steps by rank.
        steps: begin and end of each training step.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known_s = max(found[0].start_s for found in cells.values())
    whole = [pair for pair in pairwise(steps) if pair[0][0] >= known_s]
    busy = [pair for pair in whole if any(low <= pair[0][0] and pair[1][1] <= high for low, high in windows)] or whole
    first, second = max(busy, key=lambda pair: min(length_s(intersection(spans, pair)) for spans in prefills.values()))
    low_s, high_s = first[0], second[1]
    figure, axis = pyplot.subplots(figsize=(12, 1 + 0.8 * len(cells)))
    labelled: set[str] = set()
    for row, (rank, found) in enumerate(sorted(cells.items())):
        bars = [(cell.op, *span) for cell in found for span in intersection([(cell.start_s, cell.end_s)], work[rank])]
        bars += [("prefill", start_s, end_s) for start_s, end_s in prefills[rank]]
        for name, start_s, end_s in bars:
            if low_s <= start_s and end_s <= high_s + 0.001:
                label = None if name in labelled else NAMES.get(name, name)
                labelled.add(name)
                axis.broken_barh(
                    [(start_s - low_s, end_s - start_s)], (row - 0.4, 0.8), color=COLOURS[name], label=label
                )
    axis.set_yticks(range(len(cells)), [f"rank {rank}" for rank in sorted(cells)])
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.set_xlim(0, high_s - low_s)
    figure.legend(loc="upper center", ncols=6, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
