"""The engine: a DeepSpeed pipeline engine that executes any validated schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.optim import Optimizer

from weft.comm.collectives.primitives import connect_groups
from weft.comm.links import SiteNetwork
from weft.conf.host.processes import LongLived
from weft.conf.schema import WeftConfig
from weft.engine.attempt import SetUpTimes
from weft.engine.checkpoint import BackgroundWriter, engine_methods
from weft.engine.checkpoint.background import MemoryWriter
from weft.engine.checkpoint.origin import Origin
from weft.engine.deal import StepDeal
from weft.engine.deepspeed import bookkeeping, construction
from weft.engine.deepspeed.bookkeeping import advance, begin_batch, end_batch
from weft.engine.deepspeed.module import WeftModule
from weft.engine.distributed import close_groups
from weft.engine.execution.batches import draw, prepare_batch
from weft.engine.execution.executor import SlotPairs
from weft.engine.execution.neighbours import Neighbours
from weft.engine.execution.step_state import StepState
from weft.engine.interruption import Interruption
from weft.engine.models.objective import Objective
from weft.engine.models.seeding import restored_generators
from weft.engine.observability.clock import clock_for
from weft.engine.observability.measurement import SlotTrace, StepRecords
from weft.engine.observability.usage import Usage, gather_usage
from weft.engine.observability.watcher import SlotObserver, Watcher
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.communicated import close_axes
from weft.engine.planning import corrections
from weft.engine.planning.adaptation import Adaptation
from weft.engine.planning.run_plan import RunPlan
from weft.engine.planning.schedules import RankSchedule
from weft.engine.scores.step_scores import StepScores
from weft.engine.stages.teacher import Teacher
from weft.engine.step_schedules import StepSchedules
from weft.engine.stop_signals import StopSignals
from weft.engine.zero import Collectives, Comparison, ShardedOptimizer, Sharding
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import Timeline


class WeftEngine(PipelineEngine):
    """Trains the virtual stages of a rank by executing its row of a schedule.

    DeepSpeed's optimisers, learning-rate schedules, clipping, loss scaling and monitors work as in DeepSpeed.
    These are different from DeepSpeed's own pipeline engine:

    - every rank reads the same micro-batches, as dictionaries of tensors in Hugging Face's
      form, so that only hidden states travel;
    - losses are averaged over the tokens of the whole step, not over micro-batches;
    - transfers never delay computations that do not depend on them;
    - ZeRO is `weft.engine.zero` at every stage: gradients are reduced bucket by bucket while
      backwards run, and stages 2 and 3 work in a pipeline, too.

    DeepSpeed calls these methods, all from its constructor and in this order: `zero_optimization_stage`,
    `_cast_module_mixed_precision` (in 16 bits), `_broadcast_model`, `_configure_optimizer`,
    `_configure_lr_scheduler`. All others are for users. Between the first and the last line of `train_batch`
    DeepSpeed's timers, schedule and monitors are called by name (`weft.engine.deepspeed.bookkeeping`).
    """

    module: WeftModule
    optimizer: ShardedOptimizer
    basic_optimizer: Optimizer
    sharding: Sharding
    training_dataloader: Iterable | None
    groups: Sequence[dist.ProcessGroup] = ()
    """Process groups that were made for this engine, and end with it."""
    origin = Origin()
    """Base model, inputs and settings, as checkpoints record them."""
    memory: MemoryWriter | None = None
    """Takes checkpoints in host memory, in supervised runs (``checkpoint.memory_every``)."""
    checkpoint_writer: BackgroundWriter | None = None
    """Writes checkpoints while training goes on (``checkpoint.background``)."""
    stop_signals: StopSignals | None = None
    """Requests to stop, which `must_stop` shares with all ranks. To be set before the first step."""
    _destroyed = False

    zero_optimization_stage = construction.zero_optimization_stage
    _cast_module_mixed_precision = construction.cast_module_mixed_precision
    _broadcast_model = construction.broadcast_model
    _configure_optimizer = construction.configure_optimizer
    _configure_lr_scheduler = construction.configure_lr_scheduler
    eval_batch = bookkeeping.eval_batch
    get_global_grad_norm = bookkeeping.get_global_grad_norm
    finish_checkpoints = engine_methods.finish_checkpoints
    save_checkpoint = engine_methods.save_checkpoint
    load_checkpoint = engine_methods.load_checkpoint
    correct_measurements = corrections.correct_measurements

    def __init__(
        self,
        *,
        weft: WeftConfig,
        plan: RunPlan,
        collectives: Collectives,
        axes: AxisGroups | None = None,
        pairs: SlotPairs | None = None,
        wan: SiteNetwork | None = None,
        objective: Objective | None = None,
        set_up: SetUpTimes | None = None,
        **deepspeed: Any,
    ) -> None:
        """Create the engine of one rank.

        Args:
            collectives: collectives over this rank's data-parallel group.
            axes: groups of ranks that share the work of a layer with this one.
            pairs: runs strand pairs interleaved. None runs their halves one after the other.
            wan: the links between sites, or None if all stages are at one site.
            objective: minimised instead of the model's own loss.
            set_up: receives the durations of the parts of the set-up.
            deepspeed: arguments of DeepSpeed's engine, with a `WeftModule` as ``model``.
        """
        self.weft, self.plan, self.layout = weft, plan, plan.layout
        self.collectives, self.axes, self.pairs, self.wan = collectives, axes or AxisGroups(), pairs, wan
        self.set_up = set_up or SetUpTimes()
        super().__init__(**deepspeed)
        self.set_up.done("engine: DeepSpeed's")
        self.trained_modules = tuple(self.module.modules())
        connect_groups(construction.step_groups(self), self.device)
        position = plan.layout.position(self.global_rank)
        self.pipe_rank, self.replica, self.line = position.stage, position.replica, position.line
        self.num_replicas = plan.layout.replicas
        self.deal = StepDeal(self.replica, self.num_replicas)
        self.schedules = StepSchedules(plan, self.global_rank, self.deal, pairs)
        self.records = StepRecords(clock_for(self.device))
        """Measurements of the last steps."""
        self._long_lived = LongLived()
        self.holds_loss = self.schedule.placement.num_stages - 1 in self.module.stages
        self.step_loss = construction.make_loss(self, objective, counts=position.context == 0)
        self._comparison = Comparison.of_replicas(
            self.sharding,
            self.basic_optimizer,
            every=weft.supervise.compare_every,
            group=self.module.data_group,
            expert=max(1, plan.layout.expert // plan.layout.tensor),
        )
        self.interruption = Interruption(self.sharding)
        self.set_up.done("engine: ours")
        self.neighbours = Neighbours.join(
            plan.placement, plan.layout, wan=wan, device=self.device, timeout_s=weft.comm.timeout_s
        )
        self.set_up.done("channels")
        self.executor = construction.make_executor(self)
        self.slot_observers: list[SlotObserver] = []
        """Observers that are notified of every slot of a training step."""
        self.bubbles = construction.make_bubbles(self)
        if self.bubbles is not None:
            self.slot_observers.append(self.bubbles)
        self.teacher: Teacher | None = None
        """Teacher of a distillation, whose weights the ranks that compute the loss have loaded."""
        self.scores: StepScores | None = None
        """Attaches a frozen model's scores to the micro-batches of each step."""
        self.watcher = Watcher()
        self.adaptation = Adaptation(self) if weft.pipeline.adapt else None

    def attach_watcher(self, watcher: Watcher) -> None:
        """Publish this rank's progress through ``watcher`` from now on."""
        self.watcher = watcher
        self.time_events()
        position, endpoint = self.plan.layout.position, self.wan.endpoint if self.wan is not None else None
        peers = [] if endpoint is None else list(endpoint.peers)
        here = position(self.global_rank).site
        watcher.follow(self.device, endpoint, [peer for peer in peers if position(peer).site != here])
        first = self.plan
        self.slot_observers[:0] = watcher.observers(lambda: self.global_steps, lambda: self.plan is first)

    def time_events(self) -> None:
        """Time events with the watcher's timer from now on, if it has one."""
        self.records.timer = self.watcher.timer
        self.collectives.observe_waits(self.watcher.observed_waits)

    # -- set-up --------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable) -> None:
        """Read training data from ``loader``, on every rank."""
        self.training_dataloader = loader
        self.data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator) -> None:
        """Read micro-batches from ``iterator``, on every rank."""
        self.training_dataloader = None
        self.data_iterator = iterator

    # -- the step ------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """Schedule of this rank's pipeline in a step with the usual number of micro-batches."""
        return self.schedules.usual

    def train_batch(self, data_iter: Iterator | None = None) -> Tensor:
        """Train on the next batch of every replica, and return its loss per token. Collective call.

        Args:
            data_iter: micro-batches from now on, see `set_dataiterator`.

        Raises:
            NonFiniteError: on every rank, if training has diverged.
            ReplicasDiffer: on every rank, if replicas hold different numbers.
            ChannelError: another rank has ended.
            RuntimeError: an error has interrupted an earlier step of this rank, which has peers, or an update.
            SkippedTooOften: on every rank, if ``supervise.max_skips`` consecutive steps were skipped. The engine's
                state is that before them, except for its counters.
        """
        step = self.global_steps + 1
        with self.neighbours.watching(), self.watcher.step(step):
            if self.adaptation is not None:
                self.adaptation.between_steps()
            begin_batch(self, data_iter)
            count = self.deal.begin(self.data_iterator, self.micro_batches)
            plan, batches = self.plan_for(count), self._read(count)
            with self.interruption.caught(f"step {step}"):
                state = StepState(batches=batches, training=True, **self.step_loss.count(batches))
                loss = self._step(plan, state)
            loss = end_batch(self, loss)
            self._comparison.check()
            self.optimizer.skips.check()
        return loss

    def _step(self, plan: RankSchedule, state: StepState) -> Tensor:
        """Execute ``plan``, update the weights, and return the loss."""
        trace = self._begin_step(plan, state)
        with restored_generators(self.device):
            self.executor.run(plan.schedule, state)  # forwards, backwards, transfers, reductions of full buckets
        with self.executor.stepping(plan.schedule, state):
            self._comparison.before_update(self.global_steps + 1)
            self.finish_memory_copy()
            loss_sum = self.step_loss.sum(state)
            self.optimizer.reduce(self.step_loss.local_sum(state), state.hidden)
            self.optimizer.clip()
            self.optimizer.step()
        with self.watcher.waiting():
            loss = self.step_loss.share(loss_sum)
        self.optimizer.conclude()
        advance(self)
        self._end_step(trace, state)
        return loss

    def plan_for(self, num_microbatches: int) -> RankSchedule:
        """Return the same schedule with the priorities of this rank's messages between sites."""
        return self.schedules.of(num_microbatches, lambda: self.plan.schedules_for(self.weft, num_microbatches))

    def run_schedules(self, *schedules: Mapping[int, Schedule], counts: Sequence[int] = ()) -> None:
        """Run ``schedules`` of DP-cells, by their number of pipelines, from the next step on. Collective call.

        Args:
            schedules: one mapping for each number of micro-batches in ``counts``, the same on all ranks.
            counts: micro-batches of each replica. Empty or equal ones mean the usual number for all.
        """
        counts = tuple(counts) if len(schedules) > 1 else ()
        if self.scores is not None and self.deal.counts != counts:
            self.scores.forget()
        self.schedules.run(schedules, counts)

    def _read(self, count: int) -> Sequence[dict[str, Tensor]]:
        """Return the next micro-batches, with the scores that their loss needs."""
        with self.watcher.timing("data"):
            batches = draw(self.data_iterator, count, self.prepare, what=f"train_batch, step {self.global_steps + 1}")
        if self.scores is not None:
            self.scores.attach(batches)
        return batches

    def prepare(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a micro-batch in the form that stages take: this rank's part of its sequences, on the device."""
        batch = self.batch_fn(batch) if self.batch_fn else batch
        whole = self.step_loss.minimised is not None
        model = next(iter(self.module.stages.values())).hf_model
        prepared = prepare_batch(batch, self.device, self.axes.context, keep_whole=whole, model=model)
        self.step_loss.attach_items_of(prepared, batch)
        return prepared

    def _begin_step(self, plan: RankSchedule, state: StepState) -> SlotTrace:
        """Prepare sharding and links for the row that is about to be executed, and return the step's trace."""
        if self.wan is not None:
            self.wan.priorities.update(plan.priorities)
        self.sharding.begin_step(list(plan.schedule.actions(self.pipe_rank)))
        trace = self.records.begin()
        state.observers = [*self.slot_observers, trace]
        return trace

    def finish_memory_copy(self) -> None:
        """Wait until a memory checkpoint has copied the weights that are about to change."""
        if self.memory is not None:
            self.memory.before_step()

    def _end_step(self, trace: SlotTrace, state: StepState) -> None:
        """Check the labels and the objective of the step, and store its measurements."""
        self.step_loss.check(state.num_items)
        self.records.add(trace, state.peak_bytes, state.peak_chunks)
        if len(self.records) > 1:
            self.watcher.measured(lambda: self.records.busy_before_last() / self.deal.excess)
        else:
            self._long_lived.freeze()
        self.step_loss.check_objective()
        self.fwd_outputs = list(state.losses.values())

    def _seed_gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient of the loss with which a backward starts, which is the loss scale."""
        return torch.full_like(loss, self.optimizer.cur_scale)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of waits for other ranks, which count as bubbles."""
        if self.bubbles is not None:
            self.bubbles.idle()
        with self.watcher.waiting():
            yield
        if self.bubbles is not None:
            self.bubbles.busy()

    # -- checkpoints and stops -----------------------------------------------------------------

    def check_finite(self) -> None:
        """Check that the current state may be saved. Collective call, between steps.

        `save_checkpoint` and `export` call this before they write.

        Raises:
            NonFiniteError: on every rank, if the last gradient, a weight or its optimiser's state is not finite.
            ReplicasDiffer: on every rank, if replicas hold different numbers (``supervise.compare_every``).
        """
        self._comparison.now(self.global_steps)
        with self.watcher.waiting():
            self.sharding.settle()
            self.optimizer.check_finite()

    @property
    def must_stop(self) -> bool:
        """True if a rank has received a signal to stop. Becomes true after the same step on every rank."""
        return self.optimizer.must_stop

    def agree_to_stop(self) -> bool:
        """Update and return `must_stop` at another time than after a step. Collective call."""
        asked = torch.full((), float(self.is_asked_to_stop()), device=self.device)
        with self.watcher.waiting():
            dist.all_reduce(asked)
            self.optimizer.must_stop |= bool(asked)
        return self.must_stop

    def is_asked_to_stop(self) -> bool:
        """True if this rank has received a signal to stop."""
        return self.stop_signals is not None and self.stop_signals.number > 0

    # -- the end -------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Release the engine's resources, including its process groups. Collective call. Later calls do nothing."""
        if self._destroyed:
            return
        self._destroyed = True
        if self.memory is not None:
            self.memory.close()
        self.sharding.settle()  # no group is destroyed during an all-gather of the last step
        self._release()
        if self.wan is not None:
            self.wan.close()
        self.neighbours.close()
        close_groups(self.groups)
        self.groups = ()

    def interrupt(self) -> None:
        """Make this rank's waits for its neighbours fail, from any thread. `abandon` must follow."""
        if self.wan is not None:
            self.wan.abandon()
        self.neighbours.interrupt()

    def abandon(self) -> None:
        """Release this rank's resources without collective calls, because some peers may be gone.

        `weft.engine.distributed.leave_distributed` must follow. It aborts the process groups, which ends the threads of
        this engine that wait for other ranks.
        """
        if self._destroyed:
            return
        self._destroyed = True
        if self.memory is not None:
            self.memory.abandon()
        self._release()
        if self.wan is not None:
            self.wan.abandon()
        self.neighbours.close(leaving=True)
        self.groups = ()

    def _release(self) -> None:
        """Release resources that no other rank shares."""
        super().destroy()
        if self.pairs is not None:
            self.pairs.close()
        close_axes(self.axes)
        if self.adaptation is not None:
            self.adaptation.close()
        self._long_lived.release()
        if self.bubbles is not None:
            self.bubbles.close()
        if self.scores is not None:
            self.scores.close()

    def __del__(self) -> None:
        """Do nothing. DeepSpeed's engine destroys itself here, but ranks collect garbage at different times."""

    # -- measurements ----------------------------------------------------------------------------

    def measured_timelines(self) -> list[Timeline]:
        """Return timelines of the last steps, from all ranks of this replica. Collective call."""
        group = self.grid.get_pipe_parallel_group() if self.is_pipe_parallel else None
        return self.records.timelines(self.schedule, self.pipe_rank, group)

    def usage(self) -> Usage:
        """Return the usage of all ranks' devices. Collective call."""
        with self.watcher.waiting():
            return gather_usage(self.records.idle_share(), self.device)
