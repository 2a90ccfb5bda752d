"""Weft's engine on tiny models, with the strand pairs of its schedule interleaved or not."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.parallel.axis_training import axis_config
from tests.engine.tiny import batches
from weft.comm.collectives import AlphaBeta, CollectiveCosts, Group, LinkClass
from weft.comm.collectives.cache import CostCache, topology_key
from weft.conf.schema import PairChoice, Partition, PlacementKind, SiteConfig, WeftConfig
from weft.engine.initialize import initialize
from weft.engine.strands.baton import Baton


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


def trained(configs: list[WeftConfig], steps: int) -> list[dict[str, Any]]:
    """Return for each run on this rank: losses and norms of its steps, its weights' digest, and hand-overs."""
    found = []
    handovers = _count_handovers()
    for config in configs:
        before = len(handovers)
        engine, *_ = initialize(config=config)
        torch.manual_seed(dist.get_rank())
        engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
        run = [(float(engine.train_batch()), engine.get_global_grad_norm()) for _ in range(steps)]
        engine.sharding.settle()
        digest = hashlib.sha256()
        for fragment in engine.sharding.fragments():
            digest.update(fragment.name.encode() + fragment.tensor.detach().numpy().tobytes())
        plans = {name: str(plan) for name, plan in engine.pairs.plans.items()} if engine.pairs else {}
        engine.destroy()
        dist.barrier()
        found.append(
            {"steps": run, "weights": digest.hexdigest(), "handovers": handovers[before:], "plans": plans}
            | {"strand threads": sum(thread.name == "weft strand" for thread in threading.enumerate())}
        )
    return found


def _count_handovers() -> list[int]:
    """Count the hand-overs of each pair from now on."""
    counts: list[int] = []
    settle = Baton.settle

    def noting(baton: Baton) -> None:
        counts.append(baton.handovers)
        settle(baton)

    Baton.settle = noting  # type: ignore[method-assign]
    return counts
