"""Facts about strands before the first step: ranks that share layers, their links, and a rank's work in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig

from weft.comm.collectives import CollectiveCosts, Group
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.costs import AlphaBeta
from weft.comm.collectives.group import LinkClass
from weft.conf.schema import ContextExchange, WeftConfig
from weft.engine.planning.devices import data_sheet
from weft.engine.planning.facts import AxisFacts, Facts
from weft.engine.planning.pairing import traffic_s
from weft.engine.planning.strand_tracing import trace_strands
from weft.engine.precision import DTYPES
from weft.engine.strands.overlap_probe import overlap_cache, overlap_key
from weft.pipeline.strands.work import Speed, StrandWork

_LAUNCH_S = 1e-5
"""Latency of a collective inside of a host where nothing but the data sheet is known."""
log = logging.getLogger(__name__)


def with_axes(config: WeftConfig, facts: Facts, nodes: Sequence[int], device: torch.device) -> Facts:
    """Return the facts with the groups that share layers, their links, and their costs of collectives.

    Args:
        nodes: of each rank of the world.
    """
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
    operators = overlap_cache(config.data.cache_dir)
    known = facts.with_axes(axes, "; ".join(sources))
    return known.with_operators(operators.read(overlap_key(device)), f"{overlap_key(device)}, cache {operators.path}")


def with_strands(
    config: WeftConfig,
    trained: PreTrainedConfig | nn.Module,
    facts: Facts,
    speed: Callable[[], Speed],
    *,
    own_loss: bool,
) -> Facts:
    """Return the facts with the computations and collectives inside of layers, from which strand pairs are planned.

    Args:
        trained: the whole model, or the config of one that will be made.
        facts: with axes, and exchange.
        speed: returns the speed of a rank, measured on demand.
        own_loss: whether the model's own loss is minimised.
    """
    if not facts.axes or any(axis.costs is None for axis in facts.axes.values()):
        return facts
    sizes = {axis: known.group.size for axis, known in facts.axes.items()}
    try:
        strands = _traced(config, trained, sizes, facts.exchange, own_loss=own_loss)
        for part in (strands.before, *strands.layers, strands.after):
            for segment in (*part.forward, *part.backward):
                if segment.traffic is not None:
                    traffic_s(facts, segment.traffic)
    except ValueError as error:
        log.warning("strand pairs are not planned: %s", error)
        return facts
    return facts.with_strands(strands, speed())


def _traced(
    config: WeftConfig,
    trained: PreTrainedConfig | nn.Module,
    sizes: dict[str, int],
    exchange: ContextExchange,
    *,
    own_loss: bool,
) -> StrandWork:
    return trace_strands(
        trained,
        sizes,
        exchange=exchange,
        microbatch_size=config.train.microbatch_size,
        sequence_length=config.data.sequence_length,
        checkpointing=config.model.gradient_checkpointing,
        lora=config.model.lora,
        dtype=DTYPES[config.train.precision],
        own_loss=own_loss,
    )


def _collective_costs(group: Group, device: torch.device, cache: CostCache) -> tuple[CollectiveCosts | None, str]:
    """Return the costs of collectives over a group, and their source."""
    key = topology_key(group, device.type)
    if (known := cache.read(key)) is not None:
        return known, f"{key}, cache {cache.path}"
    sheet, inside = data_sheet(device), group.flat.links[0] is LinkClass.intra
    if sheet is None or not inside:
        return None, f"{key}: not measured; `weft {'profile' if inside else 'bench collectives'}` does it"
    line = AlphaBeta(_LAUNCH_S, 1 / sheet.scale_up_bytes_per_s)
    return CollectiveCosts.of_links({LinkClass.intra: line}), f"{key}: data sheet of a {sheet.name}"
