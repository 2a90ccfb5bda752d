"""A plan as a recipe that `weft launch` runs: YAML, a hostfile in pipeline order, and the assumed costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from weft.conf.host.files import write_atomic
from weft.conf.schema import LoraConfig
from weft.pipeline.costs import CostModel
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Layout
from weft.pipeline.planner.search import Plan
from weft.pipeline.profile import costs_to_yaml


def write_recipe(
    found: Plan, config: dict[str, Any] | None, model: str, path: Path, lora: LoraConfig | None = None
) -> list[Path]:
    """Write the best plan and return the files.

    Args:
        config: the model's fields, or None if the model is loaded from a folder or a hub.
        model: the folder or name of the model.
    """
    layout = found.best.layout
    hosts = dict(_hosts(found, layout))
    hostfile, costs = path.with_suffix(".hostfile"), path.with_suffix(".costs.yaml")
    lines = [f"{host} slots={slots}" for held in hosts.values() for host, slots in held]
    named = [found.cluster.sites[site].name for site in layout.sites]
    head = (
        "# @package _global_\n"
        f"# {found.work.name} on {', '.join(named)}: a step of {found.best.step_s:.4g} s is predicted by `weft plan`.\n"
        "# Put the names of your hosts into the hostfile and into cluster.sites.\n"
    )
    tree = {
        "cluster": {
            "hostfile": str(hostfile.absolute()),
            "master_addr": lines[0].split()[0],
            "sites": [{"name": name, "hosts": [host for host, _ in hosts[name]]} for name in named],
            "links": list(_links(found, layout)),
            **_routes(found, layout),
        },
        "model": {**_model(config, model), **_adapters(lora)},
        "data": {"sequence_length": found.work.sequence_length},
        "pipeline": {
            "stages": layout.num_stages,
            "recompute": "layers" if layout.checkpointing else "none",
            "schedule": layout.schedule,
            "placement": layout.arrangement,
            "chunks_per_rank": max(2, len(layout.legs)),
            "layers": list(layout.layers),
            "microbatches": layout.microbatches,
            "costs_file": str(costs.absolute()),
            "memory_cap_bytes": int(found.best.cap_bytes),
            "search_seconds": 0.0,
        },
        "parallel": _parallel(found, layout),
        "comm": {"cell": layout.cell},
        "zero": {"stage": layout.zero_stage},
        "train": {"microbatch_size": layout.microbatch_size, "precision": "bf16"},
    }
    write_atomic(hostfile, "\n".join(lines) + "\n")
    write_atomic(costs, costs_to_yaml(_costs_of_a_rank(_slowest(found, layout), layout)))
    write_atomic(path, head + yaml.safe_dump(tree, sort_keys=False))
    return [path, hostfile, costs]


def _adapters(lora: LoraConfig | None) -> dict[str, Any]:
    """Return the fields of the adapters for which `weft plan` has options."""
    return {"lora": {"enabled": True, "rank": lora.rank, "target_modules": lora.target_modules}} if lora else {}


def _parallel(found: Plan, layout: Layout) -> dict[str, Any]:
    sizes: dict[str, Any] = {axis: getattr(layout, axis) for axis in ("tensor", "context", "expert")}
    if any(found.cluster.sites[site].gpus_per_host % layout.tensor for site in layout.sites):
        sizes["tensor_across_hosts"] = True
    return sizes


def _slowest(found: Plan, layout: Layout) -> CostModel:
    """Return the costs of the route with the most compute; the configuration has the links between sites."""
    estimates = Estimates(found.cluster, found.work)
    return max(map(estimates.costs, layout.ways), key=lambda costs: sum(stage.compute_s for stage in costs.stages))


def _costs_of_a_rank(costs: CostModel, layout: Layout) -> CostModel:
    """Return the costs of one of the GPUs that share a layer.

    Each GPU sends its part of an activation over its part of the link.
    """
    sharing = layout.gpus_per_rank
    stages = tuple(replace(stage, output_bytes=stage.output_bytes / sharing) for stage in costs.stages)
    return replace(costs, stages=stages, local=replace(costs.local, bandwidth_bps=costs.local.bandwidth_bps / sharing))


def _hosts(found: Plan, layout: Layout) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield each site with its hosts, and how many ranks each host has, ordered by pipeline rank."""
    for number, held in zip(layout.sites, layout.stages, strict=True):
        site = found.cluster.sites[number]
        left = held * layout.lines_of_route
        hosts: list[tuple[str, int]] = []
        while left:
            slots = min(left, site.gpus_per_host)
            hosts.append((f"{site.name}-{len(hosts)}", slots))
            left -= slots
        yield site.name, hosts


def _routes(found: Plan, layout: Layout) -> dict[str, Any]:
    if layout.routes == 1:
        return {}
    return {"routes": [[found.cluster.sites[site].name for site in way.sites] for way in layout.ways]}


def _links(found: Plan, layout: Layout) -> Iterator[dict[str, Any]]:
    for here, there in layout.links:
        link = found.cluster.link(here, there)
        assert link is not None
        entry: dict[str, Any] = {
            "sites": [found.cluster.sites[here].name, found.cluster.sites[there].name],
            "latency_ms": link.latency_s * 1e3,
            "bandwidth_mbps": link.bandwidth_bps / 1e6,
        }
        if link.pair_bps < link.bandwidth_bps:
            entry["pair_mbps"] = link.pair_bps / 1e6
        yield entry


def _model(config: dict[str, Any] | None, model: str) -> dict[str, Any]:
    folder = Path(model).expanduser()
    if config is None:
        return {"path": model}
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return {"path": str(folder.absolute())}
    fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    return {"arch": config["model_type"], "overrides": fields}
