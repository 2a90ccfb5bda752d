"""The picture of predictions: measured steps over predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.predictions.predicted import Predicted
from weft.conf.files import replacing

_COLOURS = {1: "#4faf6a", 2: "#3f8fd2", 3: "#f0ad2f"}
_BAND = 0.05


def draw_scatter(found: Sequence[Predicted], path: Path) -> None:
    """A point for each layout, coloured by its sites, in a band of 5 % around equality."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5.0))
    axes = figure.subplots()
    most = 1.08 * max(max(one.predicted_s, one.measured_s) for one in found)
    least = 0.9 * min(min(one.predicted_s, one.measured_s) for one in found)
    ends = [least, most]
    low, high = ([(1 + sign * _BAND) * end for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color="#eef1f4", linewidth=0, label=f"within {_BAND:.0%}")
    axes.plot(ends, ends, color="#7b8794", linewidth=0.8)
    for sites, colour in _COLOURS.items():
        points = [one for one in found if one.sites == sites]
        label = f"{sites} site{'s' * (sites > 1)}"
        axes.scatter([p.predicted_s for p in points], [p.measured_s for p in points], s=28, color=colour, label=label)
    axes.set_xlim(least, most)
    axes.set_ylim(least, most)
    axes.set_xlabel("predicted step in s")
    axes.set_ylabel("measured step in s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix.lstrip(".") or "png")
