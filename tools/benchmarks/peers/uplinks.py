"""The picture of a step's uplinks: what each node sends to other sites, engine above engine (Atlas figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.tools.benchmarks.peers.sites import Uplinks

_COLOURS = ("#3f8fd2", "#f0ad2f", "#4faf6a")


@dataclass(frozen=True)
class Step:
    """One step of one engine, and what the uplinks carried around it."""

    title: str
    start_s: float
    end_s: float
    uplinks: Uplinks


def draw(steps: Sequence[Step], path: Path, *, rate_mbps: float) -> None:
    """Draw a panel per step on one time scale, a row per node, and save it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    until_s = max(step.end_s - step.start_s for step in steps)
    figure = Figure(figsize=(13, 3.4 * len(steps)), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    for number, step in enumerate(steps):
        axes = figure.add_subplot(len(steps), 1, number + 1)
        nodes = [node for node, sent in step.uplinks.sent_bytes.items() if sent[-1] > sent[0]]
        for row, node in enumerate(nodes):
            times, rates = _rates(step, node)
            heights = [0.9 * min(1.0, rate / (rate_mbps * 1e6)) for rate in rates]
            floor = len(nodes) - 1 - row
            axes.fill_between(
                times, floor, [floor + height for height in heights], step="post", color=_COLOURS[row % 3], linewidth=0
            )
        axes.set_yticks([len(nodes) - 0.55 - row for row in range(len(nodes))])
        axes.set_yticklabels([f"{node}" for node in nodes], fontsize=7)
        axes.set_ylim(0, len(nodes))
        axes.set_xlim(0, until_s)
        took_s = step.end_s - step.start_s
        axes.axvline(took_s, color="#1f2933", linewidth=1, linestyle=(0, (3, 2)))
        axes.set_title(f"{step.title}: a step takes {took_s:.2f} s", loc="left", fontsize=10)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time (s); a row is a node's uplink, full at {rate_mbps:g} Mbit/s; colours are pipelines")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _rates(step: Step, node: str) -> tuple[list[float], list[float]]:
    """Seconds since the step's start, and bits per second from each of them on."""
    at_s, sent = step.uplinks.at_s, step.uplinks.sent_bytes[node]
    inside = [i for i in range(len(at_s) - 1) if step.start_s <= at_s[i] <= step.end_s]
    return (
        [at_s[i] - step.start_s for i in inside],
        [(sent[i + 1] - sent[i]) * 8 / (at_s[i + 1] - at_s[i]) for i in inside],
    )
