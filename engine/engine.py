"""The engine: a DeepSpeed pipeline engine that executes any validated schedule."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import LAMB_OPTIMIZER
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.optim import Optimizer

from weft.comm.wan.network import WanNetwork
from weft.conf.schema import WeftConfig
from weft.engine.batches import count_label_tokens, prepare_batch
from weft.engine.bubbles import open_board
from weft.engine.checkpoint import BackgroundWriter, load_newest, save_engine
from weft.engine.clock import clock_for
from weft.engine.compute import Compute
from weft.engine.crossings import Seat
from weft.engine.distributed import close_groups, from_rank_zero
from weft.engine.executor import Executor
from weft.engine.measurement import StepRecord, gather_timeline
from weft.engine.module import WeftModule
from weft.engine.neighbours import Neighbours
from weft.engine.overlap import OverlapPlan
from weft.engine.plan import RankPlan, plan_cells, plan_evaluation
from weft.engine.step_state import StepState
from weft.engine.sums import LabelCount, ReplicaSum
from weft.engine.zero import Collectives, Lamb, ShardedOptimizer, Sharding
from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import Timeline

RECORDS_KEPT = 8
"""Steps whose measurements are kept."""


class WeftEngine(PipelineEngine):
    """Trains the virtual stages of a rank by executing its row of a schedule.

    DeepSpeed's optimisers, learning-rate schedules, clipping, loss scaling and monitors work as
    they do there. Different from DeepSpeed's own pipeline engine:

    - every rank reads the same micro-batches, as dictionaries of tensors in Hugging Face's
      form, so that only hidden states travel;
    - losses are averaged over the tokens of the whole step, not over micro-batches;
    - transfers never stand between computations that do not depend on them;
    - ZeRO is `weft.engine.zero` at every stage: gradients are reduced chunk by chunk while
      backwards run, and stages 2 and 3 go with a pipeline.
    """

    module: WeftModule
    training_dataloader: Iterable | None
    groups: Sequence[dist.ProcessGroup] = ()
    """Process groups that were made for this engine, and end with it."""

    def __init__(
        self,
        *,
        weft: WeftConfig,
        schedule: Schedule,
        costs: CostModel,
        collectives: Collectives,
        overlap: OverlapPlan | None = None,
        wan: WanNetwork | None = None,
        **deepspeed: Any,
    ) -> None:
        """Set up the rank.

        Args:
            weft: the run's configuration.
            schedule: of this rank's DP-cell, lowered and validated, for ``pipeline.microbatches``
                micro-batches.
            costs: what the schedule was planned with.
            collectives: over this rank's replicas.
            overlap: how stages are cut into chunks, and what schedules do for it; None keeps to the
                bucket sizes alone.
            wan: the links between sites, where stages lie at several.
            deepspeed: what DeepSpeed's engine takes; ``model`` is a `WeftModule`.
        """
        self.weft = weft
        self.costs = costs
        self.overlap = overlap
        self.wan = wan
        self._collectives = collectives
        super().__init__(**deepspeed)
        self.pipe_rank = self.stage_id
        self.replica = self.grid.get_data_parallel_rank()
        self.num_replicas = self.grid.get_data_parallel_world_size()
        self.seats = Seat.all(schedule.placement, self.num_replicas, weft.comm.cell)
        self._plans: dict[int, RankPlan] = {}
        self.schedule = self._plan(schedule).schedule
        self._clock = clock_for(self.device)
        self._records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self._writer: BackgroundWriter | None = None
        self._state: StepState | None = None
        self._loss_sum: ReplicaSum | None = None
        self.holds_loss = self.schedule.placement.num_stages - 1 in self.module.stages
        self._neighbours = Neighbours.join(
            self.schedule.placement, self.num_replicas, wan=wan, device=self.device, timeout_s=weft.comm.timeout_s
        )
        self.executor = self._make_executor()
        self.bubbles = open_board(
            weft,
            schedule,
            costs,
            local_rank=self.seats[self.replica].local_rank,
            rank=self.pipe_rank,
            global_rank=self.global_rank,
            device=self.device,
        )

    # -- set-up --------------------------------------------------------------------------------

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
            self.overlap.cuts if self.overlap is not None else {},
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
            check_overflow=fp16 or (self.bfloat16_enabled() and self._config.bfloat16_config.check_grad_overflow),
            replicas=grid.get_data_parallel_group() if grid.get_data_parallel_world_size() > 1 else None,
            pipeline=grid.get_pipe_parallel_group() if grid.get_pipe_parallel_world_size() > 1 else None,
        )

    def _configure_basic_optimizer(self, model_parameters: list[dict[str, Any]]) -> Optimizer:
        """The optimiser that the configuration names; DeepSpeed's own LAMB takes whole parameters on GPUs only."""
        if self.optimizer_name() == LAMB_OPTIMIZER:
            return Lamb(model_parameters, **(self.optimizer_params() or {}))
        return super()._configure_basic_optimizer(model_parameters)

    def _make_executor(self) -> Executor:
        stages, sharding = self.module.stages, self.sharding
        return Executor(
            rank=self.pipe_rank,
            stages=stages,
            compute=Compute(
                stages=stages,
                placement=self.schedule.placement,
                seed_gradient=self._seed_gradient,
                around=sharding.around,
            ),
            send_to=self._neighbours.send_to,
            receive_from=self._neighbours.receive_from,
            receive_ahead=self.weft.pipeline.receive_ahead,
            clock=self._clock,
            stage_wide={
                Op.UNSHARD: lambda action: sharding.unshard(action.stage),
                Op.RESHARD: lambda action: sharding.reshard(action.stage),
                Op.REDUCE_GRAD: lambda action: sharding.reduce(action.stage),
                Op.STEP: self._step_optimizer,
            },
            debug=self.weft.pipeline.debug,
        )

    def set_dataloader(self, loader: Iterable) -> None:
        """Read training data from ``loader``, on every rank."""
        self.training_dataloader = loader
        self.data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator) -> None:
        """Read micro-batches from ``iterator``, on every rank."""
        self.training_dataloader = None
        self.data_iterator = iterator

    # -- the step ------------------------------------------------------------------------------

    def _train_schedule(self) -> Schedule:
        return self.schedule_for(self.micro_batches)

    def schedule_for(self, num_microbatches: int) -> Schedule:
        """The schedule for a step of ``num_microbatches``, planned on first use, by all ranks together."""
        return self.plan_for(num_microbatches).schedule

    def plan_for(self, num_microbatches: int) -> RankPlan:
        """The same with what the other pipelines of this rank's DP-cell do."""
        if num_microbatches not in self._plans:
            sizes = [seat.pipelines for seat in self.seats]
            cells = from_rank_zero(
                lambda: plan_cells(
                    self.weft.pipeline,
                    self.schedule.placement,
                    sizes,
                    costs=self.costs,
                    num_microbatches=num_microbatches,
                    zero_stage=self.weft.zero.stage,
                    overlap=self.overlap,
                )
            )
            self._plan(cells[sizes[self.replica]])
        return self._plans[num_microbatches]

    def _plan(self, cell: Schedule) -> RankPlan:
        plan = RankPlan.of(cell, self.seats[self.replica].local_rank, self.pipe_rank)
        self._plans[cell.num_microbatches] = plan
        return plan

    def _exec_schedule(self, schedule: Schedule) -> None:
        batches = self._read(schedule.num_microbatches)
        state = StepState(batches=batches, num_items=self._count_items(batches), training=True)
        if self.wan is not None:
            self.wan.turns.update(self.plan_for(schedule.num_microbatches).turns)
        self._state = state
        self.sharding.begin_step(list(schedule.actions(self.pipe_rank)))
        started_at, start = time.time(), self._clock.mark()
        marks = self.executor.run(schedule, state, self.bubbles)
        self._records.append(StepRecord(started_at, start, marks, state.peak_bytes, state.peak_chunks))
        if len(self._records) == 1:
            # What lives after a step lives on: collections during later steps need not look
            # at it, which took a quarter of a second now and then (MegaScale section 6.3).
            gc.collect()
            gc.freeze()
        self._state = None
        self.fwd_outputs = list(state.losses.values())

    def _read(self, count: int) -> Sequence[dict[str, Tensor]]:
        assert self.data_iterator is not None, "train_batch() needs a data iterator, on every rank"
        return [prepare_batch(self._next_batch(), self.device) for _ in range(count)]

    def _count_items(self, batches: Sequence[dict[str, Tensor]]) -> LabelCount | None:
        """Start to count what the loss is averaged over, on ranks that compute it."""
        if not self.holds_loss:
            return None
        return LabelCount(sum(count_label_tokens(batch) for batch in batches), self.device, self._replicas())

    def _replicas(self) -> dist.ProcessGroup | None:
        return self.grid.get_data_parallel_group() if self.num_replicas > 1 else None

    def _sum_losses(self, state: StepState) -> ReplicaSum | None:
        """Start to sum the loss over micro-batches and replicas, on ranks that compute it."""
        if not state.losses:
            return None
        return ReplicaSum(torch.stack([loss.float() for loss in state.losses.values()]).sum(), self._replicas())

    def _seed_gradient(self, loss: Tensor) -> Tensor:
        """Where a backward starts; gradients are sums over micro-batches and replicas, as losses are."""
        return torch.full_like(loss, self.optimizer.cur_scale)

    def _step_optimizer(self, action: Action) -> None:
        """``STEP``: clip, step, advance the learning rate."""
        assert self._state is not None, "a step is being executed"
        self._loss_sum = self._sum_losses(self._state)
        self._exec_optimizer_step()

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the whole model's gradient in the last step, before clipping; None before the first."""
        norm = self.optimizer.gradient_norm
        return None if norm is None else norm.item()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While this rank waits for others that are not through yet: a bubble."""
        if self.bubbles is not None:
            self.bubbles.idle()
        yield
        if self.bubbles is not None:
            self.bubbles.busy()

    def _aggregate_total_loss(self) -> Tensor:
        return self._share_loss(self._loss_sum)

    def _share_loss(self, loss: ReplicaSum | None) -> Tensor:
        """The loss of the whole step on every rank, from the ranks that hold the last stage."""
        shared = torch.zeros((), device=self.device) if loss is None else loss.wait()
        if self.is_pipe_parallel:
            dist.broadcast(shared, src=self._loss_stage_global_rank(), group=self.grid.get_pipe_parallel_group())
        self.dp_group_loss = shared.clone()
        return shared

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self.schedule.placement.stage_ranks[-1])

    def eval_batch(
        self,
        data_iter: Iterator,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor | tuple[Tensor | None, list[Tensor]] | None:
        """Evaluate the next micro-batches without training on them; a collective call.

        Args:
            data_iter: micro-batches, on every rank.
            return_logits: also return each micro-batch's logits [B, S, V], on the ranks that
                hold the last stage (an empty list elsewhere).
            compute_loss: average the loss over tokens and return it; None otherwise.
            reduce_output, bcast_loss: accepted for compatibility; the loss is always averaged
                over tokens and replicas, and known to every rank.
            num_micro_batches: how many to read; as in training if None.
        """
        self.module.eval()
        schedule = plan_evaluation(
            self.schedule.placement, num_micro_batches or self.micro_batches, zero_stage=self.weft.zero.stage
        )
        batches = [prepare_batch(next(data_iter), self.device) for _ in range(schedule.num_microbatches)]
        state = StepState(
            batches=batches,
            num_items=self._count_items(batches) if compute_loss else None,
            training=False,
            keep_logits=return_logits,
        )
        self.executor.run(schedule, state)
        loss = self._share_loss(self._sum_losses(state)) if compute_loss else None
        self.module.train()
        if loss is not None and self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", loss.item(), self.global_samples)])
        if return_logits:
            return loss, [state.logits[m] for m in sorted(state.logits)]
        return loss

    def destroy(self) -> None:
        """Give back what the engine holds, its process groups included; a collective call."""
        super().destroy()
        gc.unfreeze()
        if self.bubbles is not None:
            self.bubbles.close()
        if self.wan is not None:
            self.wan.close()
        self._neighbours.close()
        close_groups(self.groups)
        self.groups = ()

    # -- what was measured -----------------------------------------------------------------------

    def measured_timelines(self) -> list[Timeline]:
        """The last steps as they were executed, from all ranks of this replica; a collective call."""
        group = self.grid.get_pipe_parallel_group() if self.is_pipe_parallel else None
        return [gather_timeline(record, self._clock, self.schedule, self.pipe_rank, group) for record in self._records]

    def bubble_share(self) -> float:
        """Share of the last step in which ranks did not compute, over all ranks; a collective call."""
        idle = torch.tensor(self._records[-1].idle_share(self._clock), device=self.device)
        dist.all_reduce(idle)
        return float(idle) / self.world_size

    def describe(self) -> str:
        """One line on how the work is laid out."""
        stages = self.num_stages * len(self.schedule.placement.legs)
        return (
            f"{self.schedule.name}, {stages} stages on {self.num_stages} ranks x {self.num_replicas} replicas, "
            f"{self.micro_batches} micro-batches, ZeRO-{self.weft.zero.stage}"
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint that is whole or absent, and fits any layout; a collective call.

        Args:
            save_dir: folder of checkpoints.
            client_state: what the caller wants back from `load_checkpoint`; JSON values.
            tag, save_latest, exclude_frozen_parameters: accepted for compatibility; checkpoints
                are named by step, and the newest whole one is found without a pointer file.
        """
        save_engine(
            self,
            Path(save_dir),
            client_state=client_state or {},
            keep=self.weft.checkpoint.keep,
            background=self._checkpoint_writer(),
        )
        return True

    def _checkpoint_writer(self) -> BackgroundWriter | None:
        if self.weft.checkpoint.background and self._writer is None:
            self._writer = BackgroundWriter.open()
        return self._writer

    def finish_checkpoints(self) -> None:
        """Wait until checkpoints that are being written are whole; a collective call.

        Raises:
            CheckpointError: on every rank: one could not be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def load_checkpoint(self, load_dir: str, tag: str | None = None, **_: Any) -> tuple[str | None, dict[str, Any]]:
        """Restore the newest whole checkpoint of a folder, or the one named; a collective call.

        Returns:
            The checkpoint's path and the caller's state; (None, {}) when there is none.
        """
        self.finish_checkpoints()
        found = load_newest(self, Path(load_dir, tag) if tag else Path(load_dir))
        return (None, {}) if found is None else (str(found[0]), found[1])
