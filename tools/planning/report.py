"""The planner's answer as a table, Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import Layout, Prediction
from weft.pipeline.planner.search import Plan
from weft.pipeline.text import bytes_text


def rows(found: Plan, most: int) -> list[dict[str, str]]:
    """Return the ranking with one row per plan, about 100 characters wide; `places` has the rest of each layout."""
    tokens = found.request.tokens
    return [
        {
            "#": str(place),
            "GPUs": f"{one.layout.gpus:,}",
            "PP x DP x TP": degrees(one),
            "micro": f"{one.layout.microbatches} x {one.layout.microbatch_size}",
            "step": f"{one.step_s:.3g} s",
            "tokens/s": f"{one.tokens_per_s:,.0f}",
            "MFU": f"{one.mfu:.0%}",
            "idle": f"{one.bubble_share:.0%}",
            "memory": f"{one.memory_share:.0%}",
            "WAN": bytes_text(one.wan_bytes),
            "hours": f"{one.hours(tokens):,.0f}",
            "cost": f"{one.cost(tokens):,.0f}",
        }
        for place, one in enumerate(found.ranked[:most], start=1)
    ]


def places(found: Plan, most: int) -> Iterator[str]:
    """Yield the sites of each plan of the ranking, with the reason for its rank."""
    for place, one in enumerate(found.ranked[:most], start=1):
        more = ", ".join(options(one.layout))
        yield f"{place}: {route_text(found.cluster, one.layout)}{f', {more}' if more else ''}; {reason(found, one)}"


def options(layout: Layout) -> Iterator[str]:
    """Describe a layout's options other than its degrees."""
    if layout.zero_stage > 1:
        yield f"ZeRO-{layout.zero_stage}"
    if layout.checkpointing:
        yield "checkpointing"
    if layout.arrangement != "straight":
        yield layout.arrangement.replace("_", " ")
    if layout.cell > 1:
        yield f"DP-cells of {layout.cell}"


def route_text(cluster: Cluster, layout: Layout) -> str:
    """Return the sites with their pipeline ranks, in pipeline order; a bar separates routes."""
    ways = [zip(way.sites, way.stages, strict=True) for way in layout.ways]
    return " | ".join(" > ".join(f"{cluster.sites[site].name} ({held})" for site, held in way) for way in ways)


def degrees(one: Prediction) -> str:
    """Return stages, replicas, and GPUs that share a layer."""
    layout = one.layout
    more = "".join(f" {name}{size}" for name, size in (("cp", layout.context), ("ep", layout.expert)) if size > 1)
    return f"{layout.num_stages} x {layout.replicas} x {layout.tensor}{more}"


def reason(found: Plan, one: Prediction) -> str:
    """Return why a plan is worse than the best; for the best plan, its bottleneck."""
    if one is found.best:
        return f"best; bound by {one.binds}"
    behind = found.request.score(one) / found.request.score(found.best) - 1
    return f"+{behind:.1%}: {one.binds}"


def summary(found: Plan, seconds: float) -> Iterator[str]:
    """Describe the search, the proven gap, and whether the WAN pays."""
    best, alone = found.best, found.alone
    work = found.work
    yield (
        f"{work.name}: {work.parameters / 1e9:.4g} B parameters, {work.active_parameters / 1e9:.4g} B multiplied "
        f"per token; {best.tokens:,} tokens a step; GPUs at {found.cluster.efficiency:.0%} of their peak"
    )
    proven = f"no layout of this space is better by more than {found.gap:.1%}"
    yield f"{found.shapes:,} shapes, {found.scheduled} layouts scheduled in {seconds:.2f} s; proven: {proven}"
    yield f"not in the space: {'; '.join(found.left_out)}"
    if alone is None:
        yield "no single site has a plan with these fields" if found.request.pins else "no single site holds the model"
    elif alone is best:
        yield f"one site is best: {found.cluster.sites[alone.layout.sites[0]].name} alone; pipelines across sites lose"
    else:
        gain = found.request.score(alone) / found.request.score(best)
        yield f"{gain:.2f} x as good as the best single site ({found.cluster.sites[alone.layout.sites[0]].name})"
    if best.mfu < 0.5 * found.cluster.efficiency:
        yield f"a poor plan: MFU {best.mfu:.1%}; what binds it is {best.binds}"


def explanation(found: Plan, one: Prediction) -> Iterator[str]:
    """Explain a layout's time and memory."""
    layout, zero = one.layout, one.memory.zero
    yield f"layers by stage: {', '.join(map(str, layout.layers))}; schedule {layout.schedule}, ZeRO-{layout.zero_stage}"
    if layout.connections:
        yield f"TCP connections per hop: {', '.join(map(str, layout.connections))}; DP-cells of {layout.cell}"
    yield (
        f"step {one.step_s:.4g} s: pipeline {one.pipeline_s:.4g}, replicas' collectives {one.collective_s:.4g}, "
        f"optimiser {one.optimizer_s:.4g}; no schedule of this layout takes less than {one.bound_s:.4g}"
    )
    parts = {
        "weights": zero.weights,
        "gradients": zero.gradients,
        "optimiser": zero.optimizer,
        "buffers": zero.buffers,
        "activations": one.memory.activations,
        "backward": one.memory.working,
    }
    named = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    yield f"fullest GPU: {bytes_text(one.memory.total)} ({one.memory_share:.0%}): {named}"
    yield f"{one.price_per_hour:,.0f} an hour for GPUs, {one.egress_per_step:.3g} a step for bytes that leave sites"


def as_json(found: Plan, most: int) -> str:
    """Return the ranking with all figures as JSON."""
    ranked = [
        {
            "sites": [found.cluster.sites[site].name for site in one.layout.sites],
            "routes": [[found.cluster.sites[site].name for site in way.sites] for way in one.layout.ways],
            "layout": {name: value for name, value in asdict(one.layout).items() if name not in ("sites", "routes")},
            "gpus": one.layout.gpus,
            **{name: getattr(one, name) for name in _FIGURES},
            "memory_bytes": one.memory.total,
            "hours": one.hours(found.request.tokens),
            "cost": one.cost(found.request.tokens),
            "why": reason(found, one),
        }
        for one in found.ranked[:most]
    ]
    head = {"model": found.work.name, "parameters": found.work.parameters, "gap": found.gap, "shapes": found.shapes}
    head["left_out"] = found.left_out
    return json.dumps({**head, "plans": ranked}, indent=2)


_FIGURES = (
    "step_s",
    "bound_s",
    "pipeline_s",
    "collective_s",
    "optimizer_s",
    "tokens_per_s",
    "mfu",
    "bubble_share",
    "memory_share",
    "wan_bytes",
    "price_per_hour",
    "egress_per_step",
)


def as_markdown(table: list[dict[str, str]]) -> str:
    """Return a table in Markdown."""
    heads = list(table[0])
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in table)])
