"""`weft bench placements`: straight, folded or folded inside each site, as the WAN gets slower."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.tools.benchmarks.results import parse, write_json
from weft.tools.tables import show, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SITES = (4, 4)
MICROBATCHES = (32, 8)
CAP = 1.5 * sum(SITES)
"""Activations of a straight stage per rank."""
WAN = 3.0
LATENCY = 1.0
STEPS = 25
"""WAN transfer times of the picture, from 0 to 6 forwards."""
_COLOURS = {"straight": "#3f8fd2", "fold": "#c4583b", "site fold": "#4faf6a"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A placement over both sites; units are those of a straight stage: F = I = W = 1, 1 activation."""

    name: str
    placement: Placement

    def costs(self, wan: float, *, split: bool = True) -> CostModel:
        """A rank's work and memory shared out over its chunks.

        Args:
            wan: forwards of a straight stage that a WAN transfer occupies the uplink for.
            split: whether a backward may be split; if not, its weight gradient counts as part
                of its input gradient.
        """
        chunk = 1 / len(self.placement.legs)
        stage = StageCost(
            forward_s=chunk,
            input_s=chunk if split else 2 * chunk,
            weight_s=chunk if split else 0.0,
            activation_bytes=chunk,
            output_bytes=1.0,
        )
        link = LinkCost(latency_s=LATENCY, bandwidth_bps=8 / wan if wan else float("inf"))
        return CostModel(stages=(stage,) * self.placement.num_stages, wan=link)

    def step(self, num_microbatches: int, wan: float, *, split: bool = True, search_s: float = 0.0) -> float:
        """Length of `auto`'s step under the cap."""
        costs = self.costs(wan, split=split)
        return simulate(generate_auto(self.placement, num_microbatches, costs, CAP, search_s), costs).step_s


def layouts() -> tuple[Layout, ...]:
    """The three that the planner chooses between."""
    return (
        Layout(name="straight", placement=Placement.straight(sum(SITES), SITES)),
        Layout(name="fold", placement=Placement.fold(sum(SITES), sites=SITES)),
        Layout(name="site fold", placement=Placement.site_fold(SITES)),
    )


def main(argv: Sequence[str]) -> int:
    """Print the reference cases, and draw the choice over WAN costs with ``--out``; returns 0."""
    parser = argparse.ArgumentParser(prog="weft bench placements", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw steps over WAN transfer times")
    parser.add_argument("--search", type=float, default=2.0, metavar="SECONDS", help="for auto, per schedule")
    args = parse(parser, argv)
    title = f"steps in forwards: sites {SITES}, WAN transfer {WAN:g} + latency {LATENCY:g}, cap {CAP:g} activations"
    rows = (_row(*case, args.search) for case in product(MICROBATCHES, layouts(), (False, True)))
    table = table_of(rows, title, left=2)
    show(table)
    if args.out:
        _draw(args.out, args.search)
        show(f"drawn: {args.out}")
    write_json(args, "placements", table)
    return 0


def _row(num_microbatches: int, layout: Layout, split: bool, search_s: float) -> dict[str, object]:
    step, ideal = layout.step(num_microbatches, WAN, split=split, search_s=search_s), 3 * num_microbatches
    return {
        "placement": layout.name,
        "backward": "split" if split else "whole",
        "micro-batches": num_microbatches,
        "step": f"{step:g}",
        "ideal": ideal,
        "bubble": f"{1 - ideal / step:.1%}",
    }


def _draw(path: Path, search_s: float) -> None:
    """One column per number of micro-batches: the steps, and below them the steps over straight's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wans = [6 * step / (STEPS - 1) for step in range(STEPS)]
    figure = Figure(figsize=(12, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(MICROBATCHES), sharex=True, height_ratios=(3, 2))
    for (upper, lower), num_microbatches in zip(zip(*panels, strict=True), MICROBATCHES, strict=True):
        steps = {o.name: [o.step(num_microbatches, wan, search_s=search_s) for wan in wans] for o in layouts()}
        for name, values in steps.items():
            upper.plot(wans, values, label=name, color=_COLOURS[name], linewidth=2)
            ratios = [value / straight for value, straight in zip(values, steps["straight"], strict=True)]
            lower.plot(wans, ratios, color=_COLOURS[name], linewidth=2)
        _mark_best(lower, wans, steps)
        upper.axhline(3 * num_microbatches, color="#7b8794", linestyle=":", label="no bubble")
        upper.set(title=f"{num_microbatches} micro-batches", ylabel="step (forwards)", ylim=(0, None))
        upper.legend(frameon=False)
        lower.set(ylabel="step over straight's", ylim=(0.9, 1.2), xlabel="WAN transfer (forwards)", xlim=(0, 6))
        for axes in (upper, lower):
            axes.grid(alpha=0.25)
    figure.suptitle(f"auto on sites of {' + '.join(map(str, SITES))} ranks; the strip shows the shortest placement")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _mark_best(axes: Axes, wans: Sequence[float], steps: Mapping[str, Sequence[float]]) -> None:
    """A strip along the bottom in the colour of the shortest."""
    half = wans[1] / 2
    for index, wan in enumerate(wans):
        best = min(steps, key=lambda name: steps[name][index])
        axes.axvspan(wan - half, wan + half, ymax=0.06, color=_COLOURS[best], linewidth=0)
