"""DeepSpeed's methods for the optimiser, as Weft has them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import LAMB_OPTIMIZER
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.optim import Optimizer

from weft.conf.schema import WeftConfig
from weft.engine.module import WeftModule
from weft.engine.observability.heartbeat import Heartbeat
from weft.engine.planning.run_plan import RunPlan
from weft.engine.precision import compute_in
from weft.engine.stages.adapter import exported_frozen
from weft.engine.stop_signals import StopSignals
from weft.engine.zero import Collectives, Comparison, Lamb, ShardedOptimizer, Sharding, Skips


class OptimizingEngine(PipelineEngine):
    """A pipeline engine whose optimiser steps `weft.engine.zero`'s buckets, at every stage of ZeRO."""

    weft: WeftConfig
    plan: RunPlan
    module: WeftModule
    heartbeat: Heartbeat
    stop_signals: StopSignals | None = None
    """Requests to stop, which `must_stop` spreads to all ranks; set it before the first step."""
    sharding: Sharding
    optimizer: ShardedOptimizer
    basic_optimizer: Optimizer
    _collectives: Collectives
    _comparison: Comparison

    @property
    def must_stop(self) -> bool:
        """Whether a signal has asked a rank to stop; it becomes true after the same step on every rank."""
        return self.optimizer.must_stop

    def agree_to_stop(self) -> bool:
        """`must_stop` where no step has just ended; a collective call."""
        asked = torch.full((), float(self._is_asked_to_stop()), device=self.device)
        with self.heartbeat.waiting():
            dist.all_reduce(asked)
            self.optimizer.must_stop |= bool(asked)
        return self.must_stop

    def _is_asked_to_stop(self) -> bool:
        return self.stop_signals is not None and self.stop_signals.number > 0

    def _waiting(self) -> AbstractContextManager[None]:
        """While this rank waits for others that are not through yet."""
        raise NotImplementedError

    def _broadcast_model(self) -> None:
        """As DeepSpeed's, over replicas; but those that share out experts hold different ones."""
        if self.plan.layout.expert == 1:
            super()._broadcast_model()

    def _make_comparison(self) -> Comparison:
        """Of this rank's replicas; see ``supervise.compare_every``."""
        group, layout = self.module.data_group, self.plan.layout
        cuts = [pair for stage in self.module.stages.values() for pair in stage.cuts.items()]
        return Comparison(
            self.sharding,
            self.basic_optimizer,
            every=self.weft.supervise.compare_every,
            replica=dist.get_rank(group),
            replicas=dist.get_process_group_ranks(group),
            group=group,
            expert=max(1, layout.expert // layout.tensor),
            experts={name for name, cut in cuts if cut.axis == "expert"},
        )

    def _cast_module_mixed_precision(
        self, param_dtype: torch.dtype | None, buffer_dtype: torch.dtype | None, *more: Any, **named: Any
    ) -> None:
        """As DeepSpeed's, but trained weights stay as they were given until buckets have taken their masters."""
        if param_dtype is not None:
            frozen = [p for stage in self.module.stages.values() for p in exported_frozen(stage)]
            compute_in(self.module.parameters(), param_dtype, set(frozen))
        super()._cast_module_mixed_precision(None, buffer_dtype, *more, **named)

    def zero_optimization(self) -> bool:
        """Whether the optimiser clips and drops gradients itself: ours does, at stage 0, too."""
        return True

    def zero_optimization_stage(self) -> int:
        """What DeepSpeed itself shards: nothing. ``weft.zero.stage`` is what `weft.engine.zero` does."""
        return 0

    def _configure_optimizer(
        self, client_optimizer: Optimizer | Callable | None, model_parameters: list[dict[str, Any]]
    ) -> None:
        """Make the optimiser, and shard it."""
        if client_optimizer is None:
            self.basic_optimizer = self._configure_basic_optimizer(model_parameters)
        elif isinstance(client_optimizer, Optimizer):
            self.basic_optimizer = client_optimizer
        else:
            self.basic_optimizer = client_optimizer(model_parameters)
        self._check_for_duplicates(self.basic_optimizer)
        self.sharding = Sharding(
            self.module.stages.values(),
            self.weft.zero,
            self._collectives,
            self.module.tied,
            self.plan.overlap.cuts if self.plan.overlap is not None else {},
        )
        grid, fp16 = self.module._grid, self.fp16_enabled()
        dtype = torch.float16 if fp16 else torch.float32
        self.optimizer = ShardedOptimizer(
            self.basic_optimizer,
            self.sharding,
            loss_scaler=CreateLossScaler(
                dtype, self.loss_scale(), self.dynamic_loss_scale(), self.dynamic_loss_scale_args()
            ),
            clip=self.gradient_clipping,
            waiting=self._waiting,
            steps_done=lambda: self.global_steps,
            stops=self._is_asked_to_stop,
            skips=Skips(self.weft.supervise.max_skips or 0, self.weft.supervise.spike),
            check_overflow=fp16 or (self.bfloat16_enabled() and self._config.bfloat16_config.check_grad_overflow),
            replicas=self.module.stage_group if self.plan.layout.lines > 1 else None,
            pipeline=grid.get_pipe_parallel_group() if grid.get_pipe_parallel_world_size() > 1 else None,
        )

    def _configure_lr_scheduler(self) -> None:
        """Make the schedule; rates before it are kept as torch's schedules keep them, for those who resume."""
        for group in self.basic_optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        super()._configure_lr_scheduler()

    def _configure_basic_optimizer(self, model_parameters: list[dict[str, Any]]) -> Optimizer:
        """The optimiser that the configuration names; DeepSpeed's own LAMB takes whole parameters on GPUs only."""
        if self.optimizer_name() == LAMB_OPTIMIZER:
            return Lamb(model_parameters, **(self.optimizer_params() or {}))
        return super()._configure_basic_optimizer(model_parameters)

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the whole model's gradient in the last step, before clipping; None before the first."""
        with self.heartbeat.waiting():
            norm = self.optimizer.gradient_norm
        return None if norm is None else norm.item()

    def check_finite(self) -> None:
        """Make sure that what was trained so far may be kept; a collective call, between steps.

        `save_checkpoint` and `export` do so before they write.

        Raises:
            NonFiniteError: on every rank: the last gradient, a weight or its optimiser's state is not finite.
            ReplicasDiffer: on every rank: they should hold the same numbers (``supervise.compare_every``).
        """
        self._comparison.now(self.global_steps)
        with self.heartbeat.waiting():
            self.sharding.settle()
            self.optimizer.check_finite()
