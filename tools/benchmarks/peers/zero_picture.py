"""The picture of a step's end: what a rank computes, and what the slow link carries meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, sleep

from weft.tools.benchmarks.peers.zero_case import ZeroRun
from weft.tools.netbed import NetBed

SAMPLE_S = 0.005
SMOOTH = 4
"""Samples that a rate is taken over."""
_COLOURS = {"F": "#4c78a8", "I": "#f58518", "W": "#e4b54a"}
_NAMES = {"F": "forward", "I": "input gradient", "W": "weight gradient"}


class Wire:
    """What the nodes of a bed have sent over the slow links, sampled."""

    def __init__(self, bed: NetBed) -> None:
        self._bed = bed
        self._samples: list[tuple[float, int]] = []

    def sample(self) -> None:
        """Take a sample, and wait until it is time for the next."""
        sent = sum(node.sent_bytes for node in self._bed.status().nodes)
        self._samples.append((perf_counter(), sent))
        sleep(SAMPLE_S)

    def rates_mbps(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """(time, Mbit/s per node) between two moments by `perf_counter`."""
        nodes = len(self._bed.nodes)
        pairs = zip(self._samples, self._samples[SMOOTH:], strict=False)
        return [
            ((a + b) / 2, (there - here) * 8e-6 / (b - a) / nodes)
            for (a, here), (b, there) in pairs
            if begin_s <= a and b <= end_s
        ]


def draw_step_ends(runs: Mapping[str, tuple[ZeroRun, Wire]], path: Path) -> None:
    """Draw, for each engine, one step and the beginning of the next: compute above, the link below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        2 * len(runs), 1, figsize=(11, 1.9 * len(runs)), sharex=True, height_ratios=[1, 2] * len(runs)
    )
    longest = max(1.25 * (run.ends_s[-1] - run.ends_s[-2]) for run, _ in runs.values())
    for number, (title, (run, wire)) in enumerate(runs.items()):
        begin = run.ends_s[-3]
        compute, link = axes[2 * number], axes[2 * number + 1]
        for op, start, end in run.spans:
            if begin <= start < begin + longest:
                compute.barh(0, end - start, left=start - begin, color=_COLOURS[op], linewidth=0)
        for ax in (compute, link):
            ax.axvline(run.ends_s[-2] - begin, color="black", linewidth=1)
            ax.spines[["top", "right"]].set_visible(False)
        compute.set_yticks([])
        compute.set_title(f"{title}: a step takes {1e3 * (run.ends_s[-2] - begin):.0f} ms", loc="left", fontsize=9)
        rates = wire.rates_mbps(begin, begin + longest)
        link.fill_between([t - begin for t, _ in rates], [rate for _, rate in rates], color="#72b7b2", linewidth=0)
        link.set_ylabel("Mbit/s", fontsize=8)
    axes[-1].set_xlim(0, longest)
    axes[-1].set_xlabel("seconds; a black line is the end of the step")
    handles = [Patch(color=colour) for colour in _COLOURS.values()]
    figure.legend(handles, _NAMES.values(), ncols=3, loc="upper right", fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
