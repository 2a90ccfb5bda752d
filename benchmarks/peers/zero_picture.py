"""The picture of a step's end: what a rank computes, and what the slow link carries meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from benchmarks.peers.uplinks import Uplinks
from benchmarks.peers.zero_case import ZeroRun

_COLOURS = {"F": "#4c78a8", "I": "#f58518", "W": "#e4b54a"}
_NAMES = {"F": "forward", "I": "input gradient", "W": "weight gradient"}


def draw_step_ends(runs: Mapping[str, tuple[ZeroRun, Uplinks]], path: Path) -> None:
    """Draw, for each engine, one step and the beginning of the next: compute above, the link below."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.9 * len(runs)))
    axes = figure.subplots(2 * len(runs), 1, sharex=True, height_ratios=[1, 2] * len(runs))
    longest = max(1.25 * (run.ends_s[-1] - run.ends_s[-2]) for run, _ in runs.values())
    for number, (title, (run, uplinks)) in enumerate(runs.items()):
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
        times, rates = zip(*(uplinks.rates_bps(node, begin, begin + longest) for node in uplinks.senders), strict=True)
        mbps = [1e-6 * mean(together) for together in zip(*rates, strict=True)]
        link.fill_between(times[0], mbps, step="post", color="#72b7b2", linewidth=0)
        link.set_ylabel("Mbit/s", fontsize=8)
    axes[-1].set_xlim(0, longest)
    axes[-1].set_xlabel("seconds; a black line is the end of the step")
    handles = [Patch(color=colour) for colour in _COLOURS.values()]
    figure.legend(handles, [*_NAMES.values()], ncols=3, loc="upper right", fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
