"""The batch: what is left open of its three numbers follows from the others, as at DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from weft.conf.schema import WeftConfig


def per_replica(config: WeftConfig) -> tuple[int, list[str]]:
    """Sequences of a step and replica by what is given of the two numbers that make them, and their names."""
    given = {
        "train.microbatch_size": config.train.microbatch_size,
        "pipeline.microbatches": config.pipeline.microbatches,
    }
    numbers = {name: number for name, number in given.items() if number}
    return prod(numbers.values()), [f"{name}={number}" for name, number in numbers.items()]


def fit_batch(config: WeftConfig, world_size: int) -> WeftConfig:
    """The configuration with no 0 left in ``train.microbatch_size`` and ``pipeline.microbatches``.

    Of a ``train.batch_size`` given alone each replica takes one micro-batch (DeepSpeed's rule).

    Raises:
        ValueError: the processes are no multiple of the stages, the batch does not come out
            even, or the schedule does not go with the micro-batches that follow.
    """
    from weft.conf.checks import check, num_replicas

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
