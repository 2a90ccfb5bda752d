"""Batch sizes: derives the numbers that are not set from the others, as DeepSpeed does."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from weft.conf.checks import check, per_replica
from weft.conf.schema import WeftConfig
from weft.conf.sites import num_routes


def fit_batch(config: WeftConfig, world_size: int) -> WeftConfig:
    """Replace a 0 in ``train.microbatch_size`` or ``pipeline.microbatches`` by the derived number.

    If only ``train.batch_size`` is given, each replica runs it as one micro-batch (DeepSpeed's rule).

    Raises:
        ValueError: the number of processes is not a multiple of the stages, the batch does not
            divide evenly, or the schedule does not support the resulting number of micro-batches.
    """
    train, count = config.train, config.pipeline.microbatches
    if train.microbatch_size and count:
        return config
    replicas = num_replicas(config, world_size)
    of_replica, names = per_replica(config)
    given = of_replica * replicas
    if not train.batch_size or train.batch_size % given:
        raise ValueError(
            f"train.batch_size={train.batch_size}: not a multiple of {' x '.join([*names, f'{replicas} replicas'])}; "
            f"choose {max(1, -(-train.batch_size // given)) * given}"
        )
    rest = train.batch_size // given
    if train.microbatch_size:
        fitted = replace(config, pipeline=replace(config.pipeline, microbatches=rest))
    else:
        fitted = replace(
            config,
            train=replace(train, microbatch_size=rest),
            pipeline=replace(config.pipeline, microbatches=count or 1),
        )
    check(fitted)
    return fitted


def check_world(config: WeftConfig, world_size: int) -> WeftConfig:
    """Return the configuration of `fit_batch`, and check that pipeline and batch fit the number of processes.

    Raises:
        ValueError: ``world_size`` is not a multiple of the ranks of a replica, the replicas cannot be divided over the
            routes, they cannot divide the experts evenly, they are fewer than a DP-cell, they have nothing to adapt,
            or the batch sizes contradict each other.
    """
    replicas = num_replicas(config, world_size)
    config = fit_batch(config, world_size)
    routes = num_routes(config.cluster)
    if replicas % routes:
        raise ValueError(
            f"cluster.routes: {world_size} processes make {replicas} replicas of the pipeline, not a multiple of the "
            f"{routes} routes; change them, or start more processes"
        )
    replicas, on_route = replicas // routes, " on each route" if routes > 1 else ""
    lines = replicas * lines_of_replica(config)
    if lines % config.parallel.expert:
        tensor = f" x {config.parallel.tensor} tensor ranks" if config.parallel.tensor > 1 else ""
        raise ValueError(
            f"parallel.expert={config.parallel.expert}: {world_size} processes make {replicas} replicas{on_route} x "
            f"{config.parallel.context} context ranks{tensor} = {lines}, not a multiple of it; choose a divisor of "
            f"{lines}, or start more processes"
        )
    if config.pipeline.adapt and config.pipeline.stages == replicas == 1:
        raise ValueError(
            "pipeline.adapt=true: one stage on one replica has nothing to adapt; use more, or set pipeline.adapt=false"
        )
    if config.comm.cell > replicas:
        raise ValueError(
            f"comm.cell={config.comm.cell}: {world_size} processes make {replicas} replicas of the pipeline{on_route}; "
            "lower it, or start more processes"
        )
    replicas *= routes
    product = config.train.microbatch_size * config.pipeline.microbatches * replicas
    if config.train.batch_size not in (0, product):
        raise ValueError(
            f"train.batch_size={config.train.batch_size}: train.microbatch_size={config.train.microbatch_size} x "
            f"pipeline.microbatches={config.pipeline.microbatches} x {replicas} replicas make {product}; "
            "change one of them, or set train.batch_size=0 or pipeline.microbatches=0 to let it follow"
        )
    return config


def lines_of_replica(config: WeftConfig) -> int:
    """Return the number of ranks of a stage that share the work of one micro-batch."""
    return config.parallel.context * config.parallel.tensor


def num_replicas(config: WeftConfig, world_size: int) -> int:
    """Return the number of replicas of the model that ``world_size`` processes make.

    Raises:
        ValueError: ``world_size`` is not a multiple of the ranks of a replica.
    """
    factors = {
        "pipeline.stages": config.pipeline.stages,
        "parallel.context": config.parallel.context,
        "parallel.tensor": config.parallel.tensor,
    }
    each = prod(factors.values())
    if world_size < 1 or world_size % each:
        used = " x ".join(f"{name}={size}" for name, size in factors.items() if size > 1 or name == "pipeline.stages")
        raise ValueError(
            f"{used}: {world_size} processes are not a multiple of it; "
            f"change it, or start {-(-max(world_size, 1) // each) * each} processes (cluster.ranks or the hostfile)"
        )
    return world_size // each
