"""Facts about ranks that share the work of layers: groups, costs of collectives, and context exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from weft.comm.collectives import CollectiveCosts, Group, Primitive
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.costs import AlphaBeta
from weft.comm.collectives.group import LinkClass
from weft.conf.schema import ChunkedLoss, ContextExchange, Float8, WeftConfig
from weft.engine.parallel.context_exchange import choose_exchange
from weft.engine.planning.devices import data_sheet
from weft.engine.planning.estimates import planning_costs, working_bytes
from weft.engine.planning.facts import AxisFacts, Facts
from weft.engine.planning.memory import rank_states
from weft.engine.planning.schedules import open_placements
from weft.engine.precision import DTYPES
from weft.engine.stages.cutting.split import split_model
from weft.pipeline.memory import USABLE, RankMemory
from weft.pipeline.workload import ModelWork

_LAUNCH_S = 1e-5
"""Latency of a collective inside of a host where nothing but the data sheet is known."""


def with_axes(config: WeftConfig, facts: Facts, nodes: Sequence[int], device: torch.device) -> Facts:
    """Return the facts with the groups that share layers, their links, and their costs of collectives."""
    if not facts.layout.axis_groups or facts.stage_pairs:
        return facts
    cache = CostCache.in_folder(config.data.cache_dir)
    axes, sources = {}, []
    for axis, groups in facts.layout.axis_groups.items():
        ranks = tuple(sorted(groups[0]))
        group = Group(ranks, tuple(nodes[rank] for rank in ranks))
        costs, source = _collective_costs(group, device, cache)
        axes[axis] = AxisFacts(group, costs)
        sources.append(f"{axis}: {source}")
    return facts.with_axes(axes, "; ".join(sources))


def _collective_costs(group: Group, device: torch.device, cache: CostCache) -> tuple[CollectiveCosts | None, str]:
    key = topology_key(group, device.type)
    if (known := cache.read(key)) is not None:
        return known, f"{key}, cache {cache.path}"
    sheet, inside = data_sheet(device), group.flat.links[0] is LinkClass.intra
    if sheet is None or not inside:
        command = "weft profile" if inside else "python -m benchmarks collectives"
        return None, f"{key}: not measured; `{command}` does it"
    line = AlphaBeta(_LAUNCH_S, 1 / sheet.scale_up_bytes_per_s)
    return CollectiveCosts.of_links({LinkClass.intra: line}), f"{key}: data sheet of a {sheet.name}"


def with_exchange(config: WeftConfig, hf_config: PreTrainedConfig, facts: Facts) -> Facts:
    """Add the chosen context exchange to the facts.

    Raises:
        UnshareableError: the model does not support the configured exchange.
    """

    def seconds(primitive: str, elements: float) -> float:
        num_bytes = tokens * elements * DTYPES[config.train.precision].itemsize
        return facts.axes["context"].seconds(Primitive(primitive), num_bytes)

    def fits(exchange: ContextExchange) -> bool:
        return needed_bytes(config, replace(facts, exchange=exchange)) <= USABLE * facts.device_bytes

    tokens = config.train.microbatch_size * config.data.sequence_length
    chosen, why = choose_exchange(
        hf_config,
        config.parallel.context_exchange,
        context=facts.layout.context,
        tensor=facts.layout.tensor,
        seconds=seconds if _known("context", facts) else None,
        attention_s=_attention_s(config, facts),
        fits=fits,
    )
    return replace(facts, exchange=chosen, sources=facts.sources | {"exchange": why})


def with_chunked_loss(config: WeftConfig, facts: Facts, *, own_loss: bool) -> Facts:
    """Decide whether the loss is computed in chunks of logits: if the model allows it, and by `model.chunked_loss`."""
    model, choice = facts.model, config.model.chunked_loss
    chunks = model.chunks_loss and own_loss and choice is not ChunkedLoss.never
    whole = replace(facts, model=replace(model, chunks_loss=False))
    if chunks and choice is ChunkedLoss.auto:
        chunks = needed_bytes(config, whole) > USABLE * facts.device_bytes
    return facts if chunks else whole


def needed_bytes(config: WeftConfig, facts: Facts) -> float:
    """Return the memory that the fullest rank needs with 1F1B, because the schedule is not known yet.

    This is its states, the activations of the micro-batches that 1F1B keeps, and one backward. On a rank with several
    stages, each stage is assumed to keep as many micro-batches as there are pipeline ranks.
    """
    placement = next(iter(open_placements(config.pipeline, facts.layout.sites_of(facts.layout.reference)).values()))
    split = split_model(facts.model, placement.num_stages, config.pipeline.split, config.pipeline.layers)
    costs, states = planning_costs(config, facts, split), rank_states(config, facts, placement, split)
    working = working_bytes(config, facts, split, costs)
    most = 0.0
    for rank, held in enumerate(placement.rank_stages):
        ahead = placement.num_ranks - (rank if len(held) == 1 else 0)
        saved = sum(costs.stages[stage].activation_bytes for stage in held)
        in_flight = min(ahead, config.pipeline.microbatches or ahead)
        memory = RankMemory(
            states[rank],
            in_flight * saved,
            max(working[stage].most for stage in held),
            concurrent_buffers=states[rank].buffers,
        )
        most = max(most, memory.total)
    return most


def _attention_s(config: WeftConfig, facts: Facts) -> float:
    """Return the seconds of a rank's attention in the forward of one layer and micro-batch, or 0 if unknown."""
    if facts.work is None or facts.flops_per_s is None or not facts.work.layers:
        return 0.0
    flops = sum(layer.attention_flops for layer in facts.work.layers) / len(facts.work.layers)
    shared = facts.layout.tensor * facts.layout.context
    return flops * config.train.microbatch_size / shared / facts.flops_per_s


def _known(axis: str, facts: Facts) -> bool:
    """True if the costs of collectives along an axis are known."""
    if axis not in facts.axes or (costs := facts.axes[axis].costs) is None:
        return False
    link = facts.axes[axis].group.flat.links[0]
    needed = (Primitive.all_gather, Primitive.reduce_scatter, Primitive.all_to_all)
    return all((link, primitive) in costs.table for primitive in needed)


def with_float8(work: ModelWork, recipe: Float8, device: torch.device) -> ModelWork:
    """Count the products of fp8 layers as bf16 operations that take as long, by the device's data sheet.

    Casts are not counted. Layers with experts, whose products stay in bf16, are not changed.
    """
    sheet = None if recipe is Float8.none else data_sheet(device)
    if sheet is None or "fp8" not in sheet.peak:
        return work
    ratio = sheet.peak["bf16"] / sheet.peak["fp8"]
    of_weights = 1.0 if recipe is Float8.rowwise_with_gw_hp else ratio
    layers = (
        replace(
            layer,
            matmul_flops=layer.matmul_flops * ratio,
            trained_flops=layer.trained_flops * of_weights,
            attention_matmul_flops=layer.attention_matmul_flops * ratio,
        )
        for layer in work.layers
    )
    return replace(
        work, layers=tuple(old if old.routed_layers else new for old, new in zip(work.layers, layers, strict=True))
    )
