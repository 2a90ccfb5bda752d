"""The engine: a DeepSpeed pipeline engine that executes any validated schedule."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import Primitive
from weft.comm.collectives.eager_connect import connect_groups
from weft.comm.wan.network import WanNetwork
from weft.conf.schema import WeftConfig
from weft.engine.checkpointing import CheckpointingEngine
from weft.engine.distributed import close_groups, from_rank_zero
from weft.engine.execution.batches import prepare_batch
from weft.engine.execution.compute import Compute
from weft.engine.execution.drawing import draw
from weft.engine.execution.executor import Executor
from weft.engine.execution.loss import StepLoss
from weft.engine.execution.neighbours import Neighbours
from weft.engine.execution.pairs import StrandPairs
from weft.engine.execution.step_state import StepState
from weft.engine.execution.sums import ReplicaSum
from weft.engine.module import WeftModule
from weft.engine.observability.bubbles import BubbleObserver, open_board
from weft.engine.observability.clock import clock_for
from weft.engine.observability.heartbeat import Heartbeat
from weft.engine.observability.measurement import StepRecords
from weft.engine.observability.set_up import SET_UP
from weft.engine.observability.slots import SlotObserver
from weft.engine.observability.usage import Usage, gather_usage
from weft.engine.optimizing import OptimizingEngine
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.communicated import close_axes
from weft.engine.planning.run_plan import RunPlan
from weft.engine.planning.schedules import RankSchedule, plan_evaluation
from weft.engine.stages.objective import Minimised, Objective
from weft.engine.stages.seeding import seeded
from weft.engine.strands.turns import Turns, are_shared, without_turns
from weft.engine.zero import Collectives
from weft.pipeline.action import Action, Op
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import Timeline


class WeftEngine(CheckpointingEngine, OptimizingEngine):
    """Trains the virtual stages of a rank by executing its row of a schedule.

    DeepSpeed's optimisers, learning-rate schedules, clipping, loss scaling and monitors work as
    they do there. Different from DeepSpeed's own pipeline engine:

    - every rank reads the same micro-batches, as dictionaries of tensors in Hugging Face's
      form, so that only hidden states travel;
    - losses are averaged over the tokens of the whole step, not over micro-batches;
    - transfers never stand between computations that do not depend on them;
    - ZeRO is `weft.engine.zero` at every stage: gradients are reduced bucket by bucket while
      backwards run, and stages 2 and 3 go with a pipeline.
    """

    module: WeftModule
    training_dataloader: Iterable | None
    _froze = False
    """Whether collections of garbage were told to leave alone what lives."""
    _destroyed = False

    def __init__(
        self,
        *,
        weft: WeftConfig,
        plan: RunPlan,
        collectives: Collectives,
        axes: AxisGroups | None = None,
        turns: Turns | None = None,
        wan: WanNetwork | None = None,
        objective: Objective | None = None,
        **deepspeed: Any,
    ) -> None:
        """Set up the rank.

        Args:
            weft: the run's configuration.
            plan: of the run, the same on all ranks.
            collectives: over the ranks that hold the same weights as this one.
            axes: ranks that share the work of a layer with this one.
            turns: that ``axes`` take where strands run; None runs the halves of pairs one after the other.
            wan: the links between sites, where stages lie at several.
            objective: what is minimised, where it is not the model's own loss.
            deepspeed: what DeepSpeed's engine takes; ``model`` is a `WeftModule`.
        """
        self.weft = weft
        self.plan = plan
        self.wan = wan
        self._collectives = collectives
        self.axes = axes or AxisGroups()
        super().__init__(**deepspeed)
        SET_UP.done("engine: DeepSpeed's")
        connect_groups(self._step_groups(), self.device)
        position = plan.layout.position(self.global_rank)
        self.pipe_rank, self.replica, self.line = position.stage, position.replica, position.line
        self.num_replicas, self.layout = plan.layout.replicas, plan.layout
        self._plans: dict[int, RankSchedule] = {}
        self.pairs: StrandPairs | None = None
        if turns is not None and are_shared(self.axes):
            self.pairs = StrandPairs.open(self.device, turns, plan.costs.pairs, strict=weft.pipeline.debug)
        self.schedule = self._plan(plan.cells).schedule
        self.records = StepRecords(clock_for(self.device))
        """What the last steps measured."""
        self._state: StepState | None = None
        self._loss_sum: ReplicaSum | None = None
        self.holds_loss = self.schedule.placement.num_stages - 1 in self.module.stages
        self.step_loss = self._make_loss(objective, counts=position.context == 0)
        self._comparison = self._make_comparison()
        SET_UP.done("engine: ours")
        self._neighbours = Neighbours.join(
            plan.placement, plan.layout, wan=wan, device=self.device, timeout_s=weft.comm.timeout_s
        )
        SET_UP.done("channels")
        self.executor = self._make_executor()
        self.bubbles = open_board(weft, plan, self.global_rank, self.device)
        self.slot_observers: list[SlotObserver] = [] if self.bubbles is None else [BubbleObserver(self.bubbles)]
        """Told of every slot of a training step."""
        self.heartbeat = Heartbeat()

    def tell(self, heartbeat: Heartbeat) -> None:
        """Have this rank's places told to whoever watches over the run."""
        self.heartbeat = heartbeat
        self._collectives.tell(heartbeat.place)
        position, endpoint = self.plan.layout.position, self.wan.endpoint if self.wan is not None else None
        peers = [] if endpoint is None else list(endpoint.peers)
        here = position(self.global_rank).site
        heartbeat.follow(self.device, endpoint, [peer for peer in peers if position(peer).site != here])
        self.slot_observers[:0] = heartbeat.observers(lambda: self.global_steps)

    # -- set-up --------------------------------------------------------------------------------

    def _make_loss(self, objective: Objective | None, *, counts: bool) -> StepLoss:
        minimised, last = None if objective is None else Minimised(objective), self.schedule.placement.num_stages - 1
        if self.holds_loss:
            self.module.stages[last].objective = minimised
        return StepLoss(
            minimised=minimised,
            holds=self.holds_loss,
            source=self.grid.stage_to_global(self.schedule.placement.stage_ranks[-1]),
            replicas=self.module.data_group if self.layout.data_ranks > 1 else None,
            pipeline=self.grid.get_pipe_parallel_group() if self.is_pipe_parallel else None,
            device=self.device,
            counts=counts,
        )

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
                random=self._random,
            ),
            send_to=self._neighbours.send_to,
            receive_from=self._neighbours.receive_from,
            receive_ahead=self.weft.pipeline.receive_ahead,
            stage_wide={
                Op.UNSHARD: lambda action: sharding.unshard(action.stage),
                Op.RESHARD: lambda action: sharding.reshard(action.stage),
                Op.REDUCE_GRAD: lambda action: sharding.reduce(action.stage),
                Op.STEP: self._step_optimizer,
            },
            debug=self.weft.pipeline.debug,
            pairs=self.pairs,
        )

    def _random(self, action: Action) -> AbstractContextManager[None]:
        """Random numbers of a forward, such as dropout's: those of its step, micro-batch, stage and part of sequences.

        They depend neither on the schedule nor on the number of replicas, and a resumed run draws them again.
        Members of a tensor group share them; `weft.engine.parallel.dropout` tells their parts apart.
        """
        assert action.microbatch is not None
        microbatch = action.microbatch * self.num_replicas + self.replica
        context = self.axes.context.index
        name = f"step {self.global_steps}, micro-batch {microbatch}, stage {action.stage}, part {context}"
        return seeded(self.weft.train.seed, name, self.device)

    def _step_groups(self) -> Iterator[tuple[dist.ProcessGroup, Collection[Primitive]]]:
        """Groups, besides the replicas' communicators, over which a step adds or tells something, and how."""
        if dist.group.WORLD is not None:
            yield dist.group.WORLD, [Primitive.all_reduce]
        for group in dict.fromkeys((self.module.data_group, self.module.stage_group)):
            yield group, [Primitive.all_reduce]
        if self.is_pipe_parallel:
            yield self.grid.get_pipe_parallel_group(), [Primitive.broadcasts, Primitive.reduces]
        yield from ((group, [Primitive.all_reduce]) for _, group in self.module.tied)

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

    def plan_for(self, num_microbatches: int) -> RankSchedule:
        """The same with what the other pipelines of this rank's DP-cell do."""
        if num_microbatches not in self._plans:
            self._plan(from_rank_zero(lambda: self.plan.cells_for(self.weft, num_microbatches), Schedule))
        return self._plans[num_microbatches]

    def _plan(self, cells: Mapping[int, Schedule]) -> RankSchedule:
        """This rank's part of a step, and the plans of its strand pairs; a collective call."""
        member = self.plan.members[self.line]
        cell = cells[member.pipelines]
        plan = self._plans[cell.num_microbatches] = RankSchedule.of(cell, member.local_rank, self.pipe_rank)
        if self.pairs is not None:
            self.pairs.agree(cells.values(), self.plan.placement.num_stages)
        return plan

    def train_batch(self, data_iter: Iterator | None = None) -> Tensor:
        """Train on the next batch, of every replica; a collective call.

        Args:
            data_iter: micro-batches from now on, as `set_dataiterator` takes them.

        Returns:
            The loss, averaged over the tokens of the step.

        Raises:
            NonFiniteError: on every rank: training has diverged.
            ReplicasDiffer: on every rank: they should hold the same numbers.
            ChannelError: another rank has ended.
            SkippedTooOften: on every rank: as many steps in a row were skipped as ``supervise.max_skips``
                allows; the engine is as it was before them, but for its counters.
        """
        with self._neighbours.watching():
            loss = super().train_batch(data_iter)
            self._comparison.check()
            self.optimizer.skips.check()
        return loss

    def _exec_schedule(self, schedule: Schedule) -> None:
        batches = self._read(schedule.num_microbatches)
        state = StepState(batches=batches, training=True, **self.step_loss.count(batches))
        if self.wan is not None:
            self.wan.priorities.update(self.plan_for(schedule.num_microbatches).priorities)
        self._state = state
        self.sharding.begin_step(list(schedule.actions(self.pipe_rank)))
        trace = self.records.begin()
        self.executor.run(schedule, state, [*self.slot_observers, trace])
        self.step_loss.check(state.num_items)
        self.records.add(trace, state.peak_bytes, state.peak_chunks)
        if len(self.records) > 1:
            self.heartbeat.measured(self.records.busy_before_last)
        if len(self.records) == 1 and not _program_freezes() and not gc.get_freeze_count():
            # What lives after a step lives on: collections during later steps need not look
            # at it, which took a quarter of a second now and then (MegaScale section 6.3).
            # A program that has frozen what it holds itself has seen to that.
            gc.collect()
            gc.freeze()
            self._froze = True
        self.step_loss.check_objective()
        self._state = None
        self.fwd_outputs = list(state.losses.values())

    def _read(self, count: int) -> Sequence[dict[str, Tensor]]:
        return draw(self.data_iterator, count, self._prepare, what=f"train_batch, step {self.global_steps + 1}")

    def _prepare(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        batch = self.batch_fn(batch) if self.batch_fn else batch
        whole = self.step_loss.minimised is not None
        prepared = prepare_batch(batch, self.device, self.axes.context, keep_whole=whole)
        self.step_loss.tell(prepared, batch)
        return prepared

    def count_items(self, batch: Mapping[str, Tensor]) -> int:
        """What of a micro-batch the loss is averaged over: tokens with labels, or what the objective says."""
        return self.step_loss.items(batch)

    def _seed_gradient(self, loss: Tensor) -> Tensor:
        """Where a backward starts; gradients are sums over micro-batches and replicas, as losses are."""
        return torch.full_like(loss, self.optimizer.cur_scale)

    def _step_optimizer(self, action: Action) -> None:
        """``STEP``: clip, step, advance the learning rate."""
        assert self._state is not None, "a step is being executed"
        self._comparison.before_update(self.global_steps + 1)
        if self.memory is not None:
            self.memory.before_step()
        self.optimizer.tell_loss(self.step_loss.held(self._state))
        self._loss_sum = self.step_loss.sum(self._state)
        self._exec_optimizer_step()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While this rank waits for others that are not through yet: a bubble."""
        if self.bubbles is not None:
            self.bubbles.idle()
        with self.heartbeat.waiting():
            yield
        if self.bubbles is not None:
            self.bubbles.busy()

    def _aggregate_total_loss(self) -> Tensor:
        with self.heartbeat.waiting():
            self.dp_group_loss = self.step_loss.share(self._loss_sum)
        return self.dp_group_loss.clone()

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
        batches = draw(data_iter, schedule.num_microbatches, self._prepare, what="eval_batch")
        state = StepState(
            batches=batches,
            training=False,
            keep_logits=return_logits,
            **(self.step_loss.count(batches) if compute_loss else {"num_items": None}),
        )
        with self._neighbours.watching():
            self.executor.run(schedule, state)
            self.step_loss.check(state.num_items)
            loss = self.step_loss.share(self.step_loss.sum(state)) if compute_loss else None
        self.module.train()
        if loss is not None and self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", loss.item(), self.global_samples)])
        if return_logits:
            return loss, [state.logits[m] for m in sorted(state.logits)]
        return loss

    def destroy(self) -> None:
        """Give back what the engine holds, its process groups included; a collective call, the first time."""
        if self._destroyed:
            return
        self._destroyed = True
        if self.memory is not None:
            self.memory.close()
        self.sharding.settle()  # no group goes while a gathering of the last step runs over it
        self._give_back()
        if self.wan is not None:
            self.wan.close()
        self._neighbours.close()
        close_groups(self.groups)
        self.groups = ()

    def interrupt(self) -> None:
        """Have this rank's waits for its neighbours fail, from any thread; `abandon` has to follow."""
        if self.wan is not None:
            self.wan.abandon()
        self._neighbours.interrupt()

    def abandon(self) -> None:
        """Give back what the engine holds with nothing said to other ranks, some of which have ended.

        `weft.engine.distributed.leave_distributed` has to follow: threads of this engine that wait for
        other ranks end with the process groups.
        """
        if self._destroyed:
            return
        self._destroyed = True
        if self.memory is not None:
            self.memory.abandon()
        self._give_back()
        if self.wan is not None:
            self.wan.abandon()
        self._neighbours.close(leaving=True)
        self.groups = ()

    def _give_back(self) -> None:
        """What no other rank knows of."""
        super().destroy()
        if self.pairs is not None:
            self.pairs.close()
        close_axes(without_turns(self.axes))
        if self._froze:
            gc.unfreeze()
        if self.bubbles is not None:
            self.bubbles.close()

    def __del__(self) -> None:
        """Nothing: DeepSpeed's engine destroys itself here, but ranks collect garbage at times of their own."""

    # -- what was measured -----------------------------------------------------------------------

    def measured_timelines(self) -> list[Timeline]:
        """The last steps as they were executed, from all ranks of this replica; a collective call."""
        group = self.grid.get_pipe_parallel_group() if self.is_pipe_parallel else None
        return self.records.timelines(self.schedule, self.pipe_rank, group)

    def usage(self) -> Usage:
        """How much of all ranks' devices was used; a collective call."""
        with self.heartbeat.waiting():
            return gather_usage(self.records.idle_share(), self.device)

    def describe(self) -> str:
        """One line on how the work is laid out."""
        stages = self.num_stages * len(self.schedule.placement.legs)
        return (
            f"{self.schedule.name}, {stages} stages on {self.num_stages} ranks x {self.num_replicas} replicas, "
            f"{self.micro_batches} micro-batches, ZeRO-{self.weft.zero.stage}"
        )


@cache
def _program_freezes() -> bool:
    """Whether this program had frozen what it holds by its first engine's first step; counting that takes 60 ms."""
    return gc.get_freeze_count() > 0
