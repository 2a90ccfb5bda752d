"""The interface that checkpoints and exports need of an engine; `weft.engine.engine.WeftEngine` has it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from weft.engine.checkpoint.origin import Origin
from weft.engine.module import WeftModule
from weft.engine.parallel.axis import AxisGroups
from weft.engine.planning.layout import RankLayout
from weft.engine.zero import ShardedOptimizer, Sharding


class Trained(Protocol):
    """A rank's part of a model that is being trained.

    Attributes:
        global_rank: of this process in the world.
        pipe_rank: position in the pipeline.
        replica: of the pipeline; `num_replicas` hold the same stages.
        layout: of all ranks.
        axes: ranks that share layers with this one.
        global_steps: optimiser steps done.
        module: this rank's stages.
        sharding: their weights, in buckets.
        optimizer: what steps the buckets; ``basic_optimizer`` holds the state.
        lr_scheduler: with ``state_dict`` and ``load_state_dict``, or None.
        origin: base model, inputs and settings of this run.
    """

    device: torch.device
    global_rank: int
    pipe_rank: int
    replica: int
    num_replicas: int
    layout: RankLayout
    axes: AxisGroups
    global_steps: int
    module: WeftModule
    sharding: Sharding
    optimizer: ShardedOptimizer
    basic_optimizer: Optimizer
    lr_scheduler: Any
    origin: Origin

    def check_finite(self) -> None:
        """Check that weights and optimiser state have no NaN or infinity; a collective call.

        Raises:
            NonFiniteError: on every rank, if they do.
        """
        ...
