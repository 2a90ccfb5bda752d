"""The engine's interface for checkpoints and exports, which `weft.engine.engine.WeftEngine` implements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.engine.checkpoint.origin import Origin
from weft.engine.layout import RankLayout
from weft.engine.parallel.axis import AxisGroups
from weft.engine.stages.cutting.stage import Stage
from weft.engine.zero import ShardedOptimizer, Sharding
from weft.pipeline.placement import Placement


class TrainedModule(Protocol):
    """A rank's stages.

    Attributes:
        stages: the rank's stages, by their number in the pipeline.
        placement: placement of the whole pipeline.
        data_group: process group of the ranks that hold the same parts of these stages.
    """

    stages: Mapping[int, Stage]
    placement: Placement
    data_group: dist.ProcessGroup

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of this rank once, by its name in the whole model."""
        ...


class Trained(Protocol):
    """A rank's part of a model in training.

    Attributes:
        pipe_rank: rank of this process in its pipeline.
        replica: index among the `num_replicas` ranks with the same stages.
        layout: layout of all ranks.
        axes: groups of ranks that share layers with this one.
        sharding: their weights, in buckets.
        optimizer: updates the buckets. ``basic_optimizer`` has the state.
        lr_scheduler: learning-rate schedule with ``state_dict`` and ``load_state_dict``, or None.
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
    module: TrainedModule
    sharding: Sharding
    optimizer: ShardedOptimizer
    basic_optimizer: Optimizer
    lr_scheduler: Any
    origin: Origin

    def check_finite(self) -> None:
        """Check that weights and optimiser state have no NaN or infinity. Collective call.

        Raises:
            NonFiniteError: on every rank, if there is NaN or infinity.
        """
        ...
