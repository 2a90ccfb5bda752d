"""The picture of two strands: what the processor and the links do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.overlap.timeline import PROCESSOR, StrandSpan
from weft.pipeline.strands.plan import Step

_COLOURS = {Step.forward: "#4c78a8", Step.backward: "#54a24b", Step.weight: "#e4b54a"}


def draw_strands(rows: Mapping[str, Sequence[StrandSpan]], path: Path) -> None:
    """Draw rows of spans, by their titles, under each other on one time scale."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = [PROCESSOR, *sorted({span.lane for spans in rows.values() for span in spans} - {PROCESSOR})]
    figure = Figure(figsize=(12, 1.2 * len(rows) * len(lanes)))
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)
    for ax, (title, spans) in zip(axes[:, 0], rows.items(), strict=True):
        for span in spans:
            width_ms = (span.end_s - span.start_s) * 1e3
            ax.barh(lanes.index(span.lane), width_ms, left=span.start_s * 1e3, color=_COLOURS[span.step], linewidth=0)
        ax.set_yticks(range(len(lanes)), [lane.replace("_", " ") for lane in lanes])
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(f"{title}: {max(span.end_s for span in spans) * 1e3:.0f} ms", loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("ms")
    figure.legend([Patch(color=colour) for colour in _COLOURS.values()], [step.name for step in _COLOURS], ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
