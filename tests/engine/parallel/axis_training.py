"""Tiny Hugging Face models trained with their layers' work shared out, and what one process makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engine.tiny import batches, tiny_config
from weft.comm.collectives import AlphaBeta, CollectiveCosts, Group, LinkClass
from weft.comm.collectives.cache import CostCache, topology_key
from weft.conf.schema import (
    ContextExchange,
    LoraConfig,
    PairChoice,
    ParallelConfig,
    Partition,
    PlacementKind,
    Recompute,
    SiteConfig,
    WeftConfig,
)
from weft.engine.checkpoint.exporting import export as export_model
from weft.engine.initialize import initialize

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": True}


def axis_config(
    arch: str = "llama",
    *,
    stages: int = 1,
    zero: int = 0,
    microbatches: int = 4,
    context: int = 1,
    exchange: str = "auto",
    expert: int = 1,
    tensor: int = 1,
    schedule: str = "1f1b",
    checkpointing: bool = False,
    precision: str = "fp32",
    bias: bool = False,
    lora: bool = False,
) -> WeftConfig:
    """Four layers, clipped, warmed up and decayed.

    Args:
        bias: of Llama's attention; others have theirs by default.
    """
    placement = "fold" if schedule in ("w", "zbv", "dualpipev") else "straight"
    config = tiny_config(
        schedule, placement, stages=stages, zero=zero, microbatches=microbatches, layers=4, precision=precision
    )
    config.model.arch = arch
    config.pipeline.recompute = Recompute.layers if checkpointing else Recompute.none
    config.model.lora = LoraConfig(enabled=lora)
    if arch == "mixtral":
        config.model.overrides |= EXPERTS
    if arch == "gpt_neox":
        del config.model.overrides["num_key_value_heads"]
    if bias:
        config.model.overrides["attention_bias"] = True
    config.data.sequence_length = 12
    config.parallel = ParallelConfig(
        tensor=tensor, context=context, context_exchange=ContextExchange[exchange], expert=expert
    )
    return config


def pair_config(
    pairs: str,
    cache: str = "",
    *,
    dropout: float = 0.0,
    layers: int = 4,
    sites: tuple[int, ...] = (),
    **axes: Any,
) -> WeftConfig:
    """W on a fold; the engine refuses plans that do not fit the strands.

    Args:
        cache: folder for what collectives between two ranks of a host take; without it nothing is planned.
        sites: pipeline ranks of each.
        axes: as of `axis_config`.
    """
    config = axis_config(schedule="w", **{"microbatches": 4} | axes)
    config.pipeline.placement = PlacementKind.any
    config.pipeline.pairs = PairChoice[pairs]
    config.cluster.sites = [SiteConfig(name=f"site{i}", ranks=ranks) for i, ranks in enumerate(sites)]
    config.zero.partition = Partition.none  # costs would cut buckets elsewhere, and norms add up in another order
    config.model.overrides |= {"num_hidden_layers": layers, "attention_dropout": dropout}
    if cache:
        config.data.cache_dir = cache
        costs = CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(1e-3, 1e-10)})
        CostCache.in_folder(cache).write(topology_key(Group((0, 1), (0, 0)), "cpu"), costs)
    return config


def go_on(config: WeftConfig, folder: str, write: bool, export: str = "") -> list[float]:
    """Losses of two steps, after two others and a checkpoint, or after reading it."""
    engine, *_ = initialize(config=config)
    steps = config.pipeline.microbatches * engine.num_replicas
    data = itertools.islice(batches(0, 1), engine.replica + (0 if write else 2 * steps), None, engine.num_replicas)
    engine.set_dataiterator(data)
    if write:
        for _ in range(2):
            engine.train_batch()
        engine.save_checkpoint(folder)
    else:
        assert engine.load_checkpoint(folder)[0] is not None
    losses = [float(engine.train_batch()) for _ in range(2)]
    if export:
        export_model(engine, Path(export))
    engine.destroy()
    return losses


def go_on_all(attempts: Sequence[tuple[WeftConfig, str, bool]]) -> list[list[float]]:
    """`go_on` with each of these arguments, one after the other in the same processes."""
    return [go_on(*attempt) for attempt in attempts]
