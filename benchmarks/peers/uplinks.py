"""What a step's uplinks carry: samples, and the picture of each node's, engine above engine (Atlas figure 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

from weft.tools.netbed import NetBed

SAMPLE_S = 0.02
_COLOURS = ("#3f8fd2", "#f0ad2f", "#4faf6a")


class Uplinks:
    """What each node of a bed has sent to other sites, over time."""

    def __init__(self, bed: NetBed) -> None:
        """Without a sample yet."""
        self._bed = bed
        self._at_s: list[float] = []
        self._sent_bytes: dict[str, list[int]] = defaultdict(list)

    def sample(self) -> None:
        """Take a sample, and wait until it is time for the next."""
        nodes = self._bed.status().nodes
        self._at_s.append(perf_counter())
        for node in nodes:
            self._sent_bytes[node.name].append(node.sent_bytes)
        sleep(SAMPLE_S)

    @property
    def senders(self) -> list[str]:
        """Nodes that have sent anything."""
        return [node for node, sent in self._sent_bytes.items() if sent[-1] > sent[0]]

    def rates_bps(self, node: str, begin_s: float, end_s: float) -> tuple[list[float], list[float]]:
        """Times between two by `perf_counter`, in seconds since the first, and bits per second from each on."""
        at_s, sent = self._at_s, self._sent_bytes[node]
        inside = [i for i in range(len(at_s) - 1) if begin_s <= at_s[i] <= end_s]
        return (
            [at_s[i] - begin_s for i in inside],
            [(sent[i + 1] - sent[i]) * 8 / (at_s[i + 1] - at_s[i]) for i in inside],
        )


@dataclass(frozen=True)
class Step:
    """One step of one engine, and what the uplinks carried around it."""

    title: str
    start_s: float
    end_s: float
    uplinks: Uplinks


def draw(steps: Sequence[Step], path: Path, *, rate_mbps: float) -> None:
    """Draw a panel per step on one time scale, a row per node, and save it."""
    from matplotlib.figure import Figure

    until_s = max(step.end_s - step.start_s for step in steps)
    figure = Figure(figsize=(13, 3.4 * len(steps)), dpi=110, facecolor="white")
    for number, step in enumerate(steps):
        axes = figure.add_subplot(len(steps), 1, number + 1)
        nodes = step.uplinks.senders
        for row, node in enumerate(nodes):
            times, rates = step.uplinks.rates_bps(node, step.start_s, step.end_s)
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
