"""The planner's answer as a picture: the parts of each plan's step, with its time and cost."""

from __future__ import annotations

from pathlib import Path

from weft.conf.host.files import replacing
from weft.pipeline.planner.layout import Prediction
from weft.pipeline.planner.search import Plan
from weft.tools.planning.report import degrees, options, route_text

_INK, _PAPER = "#1f2933", "#ffffff"
_PARTS = {
    "compute": "#3f8fd2",
    "bubbles of the pipeline": "#dfe4e9",
    "collectives over replicas": "#b9a5dd",
    "optimiser": "#52606d",
}
_WIDTH_INCHES, _ROW_INCHES, _DPI = 12.0, 0.55, 150


def plot_plans(found: Plan, most: int, path: Path) -> None:
    """Draw the ranking, a bar of seconds for each plan, and save it in the format of the suffix, or as PNG without one.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not support the format.
    """
    from matplotlib.figure import Figure

    ranked = found.ranked[:most]
    height = _ROW_INCHES * len(ranked) + 1.6
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, facecolor=_PAPER)
    axes = figure.add_axes((0.34, 0.75 / height, 0.45, 1 - 1.3 / height))
    left = [0.0] * len(ranked)
    for name, colour in _PARTS.items():
        seconds = [_parts(one)[name] for one in ranked]
        axes.barh(range(len(ranked)), seconds, left=left, color=colour, label=name, height=0.62)
        left = [before + more for before, more in zip(left, seconds, strict=True)]
    for place, one in enumerate(ranked):
        cost = f", cost {one.cost(found.request.tokens):,.0f}" if one.cost_per_step else ""
        text = f"{one.tokens_per_s:,.0f} tokens/s, MFU {one.mfu:.0%}\nmemory {one.memory_share:.0%}{cost}"
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=_INK)
    axes.set_yticks(
        range(len(ranked)),
        [f"{_route(found, one)}\n{', '.join([degrees(one), *options(one.layout)])}" for one in ranked],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step", fontsize=8, color=_INK)
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    proven = f"nothing in this space is better by more than {found.gap:.1%}"
    axes.set_title(f"{found.work.name}: {proven}", loc="left", fontsize=10, fontweight="bold", color=_INK)
    figure.legend(loc="lower center", ncol=len(_PARTS), frameon=False, fontsize=8, labelcolor=_INK)
    with replacing(path) as draft:
        figure.savefig(draft, format=path.suffix.lstrip(".") or "png")


def _parts(one: Prediction) -> dict[str, float]:
    """Return the seconds of a step by part."""
    idle_s = max(0.0, one.step_s - one.collective_s - one.optimizer_s - one.busy_s)
    return dict(zip(_PARTS, (one.busy_s, idle_s, one.collective_s, one.optimizer_s), strict=True))


def _route(found: Plan, one: Prediction) -> str:
    route, names = route_text(found.cluster, one.layout), [found.cluster.sites[site].name for site in one.layout.sites]
    on = f" on {one.layout.routes} routes" if one.layout.routes > 1 else ""
    return route if len(route) <= 60 else f"{names[0]} > ... > {names[-1]}, {len(names)} sites{on}"
