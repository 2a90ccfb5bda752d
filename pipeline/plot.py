"""Plot timelines above each other on one time axis, with activation memory at the side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.conf.host.files import replacing
from weft.pipeline.action import COMPUTE, RECEIVES, RELAYS, SENDS, Action, Op
from weft.pipeline.text import bytes_text
from weft.pipeline.timeline import SEND_LANE, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _MUTED, _IDLE, _PAPER = "#1f2933", "#7b8794", "#eef1f4", "#ffffff"
# (light, dark): a rank's first chunk is light, its last one dark.
_COLOURS = {
    Op.F: ("#8ec5f2", "#3f8fd2"),
    Op.B: ("#a8dcb0", "#4faf6a"),
    Op.I: ("#f3b9cb", "#d4628a"),
    Op.W: ("#fbd88b", "#f0ad2f"),
    Op.REDUCE_GRAD: ("#b9a5dd", "#b9a5dd"),
    Op.UNSHARD: ("#d5c9ec", "#d5c9ec"),
    Op.STEP: ("#52606d", "#52606d"),
    Op.SEND_F: ("#1c5f9e", "#1c5f9e"),
    Op.SEND_B: ("#1f7a3d", "#1f7a3d"),
    Op.RELAY_F: ("#7fa8cf", "#7fa8cf"),
    Op.RELAY_B: ("#86b896", "#86b896"),
}
_LEGEND = (
    ("forward", Op.F),
    ("backward", Op.B),
    ("input gradient", Op.I),
    ("weight gradient", Op.W),
    ("activations on their way", Op.SEND_F),
    ("gradients on their way", Op.SEND_B),
    ("activations relayed", Op.RELAY_F),
    ("gradients relayed", Op.RELAY_B),
    ("gradient reduction", Op.REDUCE_GRAD),
    ("weight all-gather", Op.UNSHARD),
    ("optimiser step", Op.STEP),
)
# A rank's row from its top (0) to its bottom (1): compute, then thin lanes.
_COMPUTE = (0.06, 0.70)
_THIN = {
    **dict.fromkeys((Op.SEND_F, Op.RELAY_F), (0.74, 0.80)),
    **dict.fromkeys((Op.SEND_B, Op.RELAY_B), (0.81, 0.87)),
    Op.REDUCE_GRAD: (0.89, 0.96),
    Op.UNSHARD: (0.89, 0.96),
}
_DPI = 150
_USUAL_INCHES, _MOST_INCHES = 16.0, 64.0
_MOST_SPANS, _MOST_RANKS = 60_000, 1_500
"""Maximum number of spans and ranks of a picture; more take minutes to draw, or exceed a file's height."""
_SLOT_PIXELS = 19
"""Width of a slot that fits a vertical number."""
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (0.0, "µs"))


@dataclass(frozen=True)
class _Box:
    """A rectangle for one action; ``top`` and ``bottom`` count in ranks from the top of the plot."""

    action: Action
    start_s: float
    end_s: float
    top: float
    bottom: float


def plot_timelines(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw ``timelines`` above each other on one time scale, and save a PNG (or the suffix's format).

    Each rank is a row: compute with micro-batch numbers where they fit (vertical in narrow cells),
    a strand pair split into forward (top) and backward (bottom), thin lanes for the transfers that
    it sends and for collectives over replicas, and hatching for bubbles. A rank's later chunks are
    darker. Bars at the side show peak activation memory.

    Raises:
        ValueError: ``timelines`` is empty, one has no spans, or there are too many for a picture.
    """
    from matplotlib.figure import Figure

    if not timelines or not all(timeline.spans for timeline in timelines):
        raise ValueError("timelines: nothing to draw; give at least one timeline that has spans")
    spans, ranks = sum(len(t.spans) for t in timelines), sum(t.num_ranks for t in timelines)
    if spans > _MOST_SPANS or ranks > _MOST_RANKS:
        raise ValueError(
            f"timelines: {spans:,} spans in {ranks:,} rows are more than the {_MOST_SPANS:,} in {_MOST_RANKS:,} that a "
            "picture can show; draw fewer ranks or micro-batches, or write them for Perfetto"
        )
    width_inches = _width_inches(timelines)
    row_inches = 0.46 if max(t.num_ranks for t in timelines) <= 16 else 0.26
    heights = [timeline.num_ranks * row_inches for timeline in timelines]
    height_inches = sum(heights) + 0.6 * len(heights) + 0.8
    figure = Figure(figsize=(width_inches, height_inches), dpi=_DPI, facecolor=_PAPER)
    grid = figure.add_gridspec(
        len(timelines),
        2,
        width_ratios=(width_inches - 2.4, 1.12),
        height_ratios=heights,
        left=0.72 / width_inches,
        right=1 - 0.56 / width_inches,
        top=1 - 0.42 / height_inches,
        bottom=0.95 / height_inches,
        wspace=0.02,
        hspace=0.6 * len(heights) / max(sum(heights), 1e-9),
    )
    until_s = max(timeline.step_s for timeline in timelines)
    most_bytes = max(max(timeline.peak_bytes) for timeline in timelines)
    for number, timeline in enumerate(timelines):
        axes = figure.add_subplot(grid[number, 0])
        _draw_rows(axes, timeline, until_s, last=number + 1 == len(timelines))
        _draw_memory(figure.add_subplot(grid[number, 1]), timeline, most_bytes)
    _draw_legend(figure, timelines, height_inches)
    with replacing(path) as draft:
        figure.savefig(draft, format=path.suffix.lstrip(".") or "png")


def _width_inches(timelines: Sequence[Timeline]) -> float:
    lasting_s = sorted(s.end_s - s.start_s for timeline in timelines for lane in timeline.compute for s in lane)
    short_s = lasting_s[len(lasting_s) // 4] if lasting_s else 0.0
    step_s = max(timeline.step_s for timeline in timelines)
    inches = 2.4 + _SLOT_PIXELS / _DPI * (step_s / short_s if short_s else 0.0)
    return min(max(_USUAL_INCHES, inches), _MOST_INCHES)


def _draw_rows(axes: Axes, timeline: Timeline, until_s: float, *, last: bool) -> None:
    from matplotlib.collections import PolyCollection

    scale, unit = next((s, u) for s, u in _TIME_UNITS if until_s >= s)
    scale = scale or 1e-6
    axes.set_xlim(0, until_s / scale)
    axes.set_ylim(timeline.num_ranks + 0.05, 0)
    first, bottom = _COMPUTE
    idle = [
        _corners(start_s / scale, end_s / scale, rank + first, rank + bottom)
        for rank in range(timeline.num_ranks)
        for start_s, end_s in timeline.bubbles(rank)
    ]
    axes.add_collection(PolyCollection(idle, facecolor=_IDLE, edgecolor="#cfd6dd", hatch="/////", linewidth=0))
    pixel = until_s / scale / axes.bbox.width
    chunks = _chunk_shades(timeline)
    numbers_fit = True
    by_look: dict[tuple[str, float], list[list[tuple[float, float]]]] = defaultdict(list)
    for box in _boxes(timeline):
        start, end = box.start_s / scale, box.end_s / scale
        # A thin white line between neighbours, if there is room.
        line = 0.5 if box.action.op in COMPUTE and end - start > 4 * pixel else 0.0
        colour = _mix(*_COLOURS[box.action.op], chunks.get(box.action.stage, 0.0))
        by_look[colour, line].append(_corners(start, end, box.top, box.bottom))
        numbers_fit &= _write_number(axes, box, start, end, pixel)
    for (colour, line), corners in by_look.items():
        axes.add_collection(PolyCollection(corners, facecolor=colour, edgecolor=_PAPER, linewidth=line))
    axes.set_yticks([rank + (first + bottom) / 2 for rank in range(timeline.num_ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(timeline.num_ranks)], fontsize=8, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=3, labelsize=8, colors=_MUTED, labelbottom=last)
    if last:
        axes.set_xlabel(f"time ({unit})", fontsize=9, color=_MUTED)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cbd2d9")
    axes.axvline(timeline.step_s / scale, color=_INK, linewidth=1.0, linestyle=(0, (3, 2)), clip_on=False)
    axes.set_title(timeline.name, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=5)
    axes.set_title(
        f"step {timeline.step_s / scale:.4g} {unit}     bubbles {100 * timeline.bubble_share:.1f} %"
        + ("" if numbers_fit else "     (cells too narrow for a number have none)"),
        loc="right",
        fontsize=9,
        color=_INK,
        pad=5,
    )


def _boxes(timeline: Timeline) -> Iterator[_Box]:
    first, bottom = _COMPUTE
    for span in timeline.spans:
        action = span.slot[0]
        if span.lane == SEND_LANE:
            continue
        if action.op in _THIN:
            top, end = _THIN[action.op]
            yield _Box(action, span.start_s, span.end_s, span.rank + top, span.rank + end)
        elif action.op not in RECEIVES:
            share = (bottom - first) / len(span.slot)
            for place, half in enumerate(span.slot):
                top = span.rank + first + place * share
                yield _Box(half, span.start_s, span.end_s, top, top + share)


def _write_number(axes: Axes, box: _Box, start: float, end: float, pixel: float) -> bool:
    """Write the micro-batch into the box, vertically if only that fits; return False if neither fits."""
    if box.action.op not in COMPUTE:
        return True
    text = str(box.action.microbatch)
    half = box.bottom - box.top < 0.9 * (_COMPUTE[1] - _COMPUTE[0])
    size = 6.0 if half else 7.5
    letter = size * _DPI / 72
    along, across = (len(text) * 0.62 + 0.35) * letter, 1.15 * letter
    width = (end - start) / pixel
    height = (box.bottom - box.top) * axes.bbox.height / (axes.get_ylim()[0] - axes.get_ylim()[1])
    upright = width <= along
    if upright and (width <= across or height <= along):
        return False
    axes.text(
        (start + end) / 2,
        (box.top + box.bottom) / 2 + (0.0 if upright else 0.02),
        text,
        ha="center",
        va="center_baseline" if upright else "center",
        rotation=90 if upright else 0,
        fontsize=size,
        color=_INK,
        clip_on=True,
        zorder=5,
    )
    return True


def _draw_memory(axes: Axes, timeline: Timeline, most_bytes: float) -> None:
    """Draw one bar per rank: its peak activation memory."""
    middle = sum(_COMPUTE) / 2
    ranks = [rank + middle for rank in range(timeline.num_ranks)]
    axes.barh(ranks, timeline.peak_bytes, height=_COMPUTE[1] - _COMPUTE[0], color="#d9c7e8", linewidth=0)
    axes.set_ylim(timeline.num_ranks + 0.05, 0)
    axes.set_xlim(0, most_bytes or 1.0)
    for rank, num_bytes in enumerate(timeline.peak_bytes):
        label = f" {bytes_text(num_bytes)}, {timeline.live_microbatches[rank]} live"
        axes.text(0, rank + middle + 0.02, label, ha="left", va="center", fontsize=6.5, color=_INK)
    axes.set_axis_off()
    axes.set_title("peak activations", fontsize=8, color=_MUTED, loc="left", pad=5)


def _draw_legend(figure: Figure, timelines: Sequence[Timeline], height_inches: float) -> None:
    from matplotlib.patches import Patch

    seen = {box.action.op for timeline in timelines for box in _boxes(timeline)}
    handles = [Patch(facecolor=_mix(*_COLOURS[op], 0.5), label=name) for name, op in _LEGEND if op in seen]
    handles.append(Patch(facecolor=_IDLE, edgecolor="#cfd6dd", hatch="/////", linewidth=0, label="bubble"))
    if any(len(set(_chunk_shades(timeline).values())) > 1 for timeline in timelines):
        handles.append(Patch(facecolor=_PAPER, linewidth=0, label="light: a rank's first chunk, dark: its last"))
    figure.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.08 / height_inches),
        ncol=len(handles),
        frameon=False,
        fontsize=8,
        labelcolor=_INK,
        handlelength=1.2,
        columnspacing=1.3,
    )


def _chunk_shades(timeline: Timeline) -> dict[int, float]:
    """Return the shade of each virtual stage: 0 for a rank's first chunk, 1 (dark) for its last."""
    held: dict[int, set[int]] = defaultdict(set)
    for span in timeline.spans:
        if span.slot[0].op not in SENDS | RELAYS:
            held[span.rank].update(action.stage for action in span.slot)
    return {
        stage: place / (len(stages) - 1) if len(stages) > 1 else 0.5
        for stages in held.values()
        for place, stage in enumerate(sorted(stages))
    }


def _corners(start: float, end: float, top: float, bottom: float) -> list[tuple[float, float]]:
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _mix(light: str, dark: str, share: float) -> str:
    parts = (round(int(light[i : i + 2], 16) * (1 - share) + int(dark[i : i + 2], 16) * share) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)
