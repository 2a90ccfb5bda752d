"""Adaptation: the ranks share their measured costs, and change together to a schedule that is planned with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft.comm.job import current_job
from weft.engine.distributed import from_rank_zero
from weft.engine.observability.clock import Clock
from weft.engine.observability.measurement import RECORDS_KEPT, StepRecord
from weft.engine.planning.deviation import Deviation, clean, interval_of, with_measured
from weft.engine.planning.estimates import stage_sizes
from weft.engine.planning.layer_moves import balanced_layers, largest
from weft.engine.planning.memory import rank_states
from weft.engine.planning.next_attempt import NextAttempt
from weft.engine.planning.plan_file import ReplicaPlans
from weft.engine.planning.replanning import (
    UNSUPERVISED,
    Proposal,
    Replanning,
    Request,
    Restart,
    alike,
    schedule_for,
)
from weft.engine.planning.schedules import open_placements
from weft.engine.planning.spreads import LinkMeter, with_jitter
from weft.engine.stages.cutting.split import StageSplit
from weft.pipeline.action import COMPUTE, Op
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.jitter import jitter_of
from weft.pipeline.memory import USABLE, peak_bytes

if TYPE_CHECKING:
    from weft.engine.engine import WeftEngine
    from weft.engine.planning.run_plan import RunPlan
    from weft.pipeline.schedule import Schedule

_NOT_READY, _READY = 0.0, 1.0
_MOST_NAMED = 8


class Adaptation:
    """Changes the schedule of a run whose measured costs have changed. All calls are collective.

    Every few steps the ranks exchange their measured costs in one all-reduce, whose maximum is what each stage of each
    replica takes. So all ranks decide the same. Rank 0 then plans in another process, and a later all-reduce
    includes whether the plan is ready.
    """

    def __init__(self, engine: WeftEngine) -> None:
        """Observe ``engine``. Raise ValueError if the job is emulated, so that nothing is measured."""
        if not current_job().is_real:
            raise ValueError(
                "pipeline.adapt=true: the durations of emulated ranks are configured, so they never leave the plan; "
                "set pipeline.adapt=false"
            )
        pipeline, self._engine = engine.weft.pipeline, engine
        stages = engine.plan.placement.num_stages
        self._interval = interval_of(pipeline.adapt_steps, RECORDS_KEPT - 1)
        is_known = engine.plan.facts.flops_per_s is None  # estimates may be wrong by more than a slow rank
        planned = [(cost.forward_s, cost.input_s, cost.weight_s) for cost in engine.plan.costs.stages if is_known]
        self._deviation = Deviation(
            num_stages=stages,
            steps=pipeline.adapt_steps,
            interval=self._interval,
            replicas=engine.num_replicas,
            plan_costs=clean([*chain(*planned)] * engine.num_replicas),
        )
        schedule = engine.plan.schedules[1]
        self._original = schedule
        self._schedules: tuple[Schedule, ...] = (schedule,)
        self._counts = (schedule.num_microbatches,) * engine.num_replicas
        self._first: tuple[float, ...] = ()
        self._num_sites = len(engine.plan.placement.sites)
        self._links = LinkMeter(engine, pipeline.adapt_steps)
        self._jitters: tuple[float, ...] = ()
        self._is_planning = False
        self._slow: tuple[int, ...] = ()
        self._replanning: Replanning | None = None
        self.proposals: list[tuple[int, Proposal]] = []
        """The plans that were made, with the number of steps before each."""
        self.on_change: Callable[[ReplicaPlans], None] | None = None
        """Receives what replicas run from the next step on, on every rank."""
        self.restart: Callable[[int], Restart] = lambda step: Restart(obstacle=UNSUPERVISED)
        """Returns, on rank 0, the price of a restart from the next checkpoint after a step."""
        self.on_restart: Callable[[NextAttempt, CostModel | None], None] | None = None
        """Receives, on rank 0, after each plan what the next checkpoint changes, and costs with other numbers of
        layers. Without slow ranks and arguments nothing changes."""

    def between_steps(self) -> None:
        """Exchange the costs of the last steps, if they are due, and change the schedule, if a plan is ready."""
        engine = self._engine
        step = engine.global_steps
        self._links.step_ended()
        if not step or step % self._interval or len(engine.records) < min(RECORDS_KEPT, self._interval + 1):
            return
        vector, self._jitters, is_ready = self._exchanged()
        if self._is_planning:
            if is_ready:
                self._change(step)
        elif self._deviation.observe(step, vector):
            self._is_planning = True
            self._first = self._first or self._deviation.reference
            if engine.global_rank == 0:
                self._start()

    def costs(self) -> CostModel:
        """Return this replica's measured costs that the schedule was planned with, after the first plan."""
        return self._measured(self._engine.plan.costs, self._deviation.reference)[self._engine.replica]

    def close(self) -> None:
        """End the process that plans. Not collective."""
        if self._replanning is not None:
            self._replanning.close()
            self._replanning = None

    def _exchanged(self) -> tuple[Sequence[float], tuple[float, ...], bool]:
        """Return the largest value of all ranks for each duration and each jitter, and whether a plan is ready."""
        engine = self._engine
        ready = (
            self._is_planning and engine.global_rank == 0 and (self._replanning is None or self._replanning.has_ended)
        )
        durations = [*self._of_replicas(self._stage_seconds()), *self._links.rates()]
        jitters = [*self._of_replicas(self._stage_jitters()), *self._links.jitters()]
        mine = [*durations, *jitters, _READY if ready else _NOT_READY]
        finite = torch.tensor(mine, dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0).to(engine.device)
        with engine.watcher.waiting():
            dist.all_reduce(finite, op=dist.ReduceOp.MAX)
        everyones: list[float] = finite.tolist()
        size = len(durations)
        return everyones[:size], tuple(everyones[size:-1]), everyones[-1] == _READY

    def _of_replicas(self, own: Sequence[float]) -> Iterator[float]:
        """Yield a number for each stage of each replica, with 0 for those of other replicas."""
        for replica in range(self._engine.num_replicas):
            yield from own if replica == self._engine.replica else [0.0] * len(own)

    def _stage_seconds(self) -> list[float]:
        """Return the seconds of each stage's forward, input and weight gradient on this rank, and 0 for others'."""
        engine = self._engine
        found = {key: median(values) for key, values in slot_seconds(self._kept(), engine.records.clock).items()}
        numbers = []
        for stage in range(self._deviation.num_stages):
            whole_s = found.get((Op.B, stage), 0.0)
            parts = (Op.F, 0.0), (Op.I, whole_s / 2), (Op.W, whole_s / 2)
            numbers += [found.get((op, stage), usual_s) for op, usual_s in parts]
        return numbers

    def _stage_jitters(self) -> list[float]:
        """Return the jitter of each stage on this rank, and 0 for others'."""
        found = slot_seconds(self._kept(), self._engine.records.clock)
        numbers = range(self._deviation.num_stages)
        return [jitter_of(values for (_, at), values in found.items() if at == stage) for stage in numbers]

    def _kept(self) -> list[StepRecord]:
        """Return the records of the last window. The device has finished all steps but the last."""
        records = self._engine.records
        return [records[at] for at in range(-min(self._interval + 1, len(records)), -1)]

    def _start(self) -> None:
        with suppress(OSError):  # without another process there is no plan, see `_result`
            self._replanning = Replanning(self._request())

    def _request(self) -> Request:
        engine, deviation = self._engine, self._deviation
        plan, config, costs = engine.plan, engine.weft, engine.plan.costs
        cap = config.pipeline.memory_cap_bytes
        if not cap:  # `auto` has set its own, of activations that count until their weight gradients
            costs = replace(costs, stages=tuple(map(_until_weight, costs.stages)))
            cap = ceil(peak_bytes(self._original, costs))
        self._slow = tuple(
            plan.layout.rank(stage=plan.placement.stage_ranks[stage], replica=replica)
            for replica, stage in deviation.slower()
        )
        request = Request(
            config=replace(config.pipeline, memory_cap_bytes=cap),
            schedules=self._schedules,
            counts=self._counts,
            measured=self._measured(costs, deviation.measured),
            usual=self._measured(costs, deviation.reference),
            layers=plan.split.counts,
            fixed=_fixed_shares(plan),
            zero_stage=config.zero.stage,
            has_slow_rank=bool(self._slow),
            obstacle=self._obstacle(),
            restart=self.restart(engine.global_steps),
        )
        moved = balanced_layers(
            largest(request.measured), request.layers, request.fixed, request.placement, fits=self._fits
        )
        return replace(request, moved=moved if moved != request.layers else ())

    def _fits(self, counts: Sequence[int]) -> bool:
        """True if no rank with these numbers of layers needs more than its device has, or than any rank needs now."""
        plan = self._engine.plan
        states = rank_states(self._engine.weft, plan.facts, plan.placement, StageSplit(tuple(counts)))
        limit = max(USABLE * plan.facts.device_bytes, max(memory.total for memory in plan.memory))
        for held, now, state in zip(plan.placement.rank_stages, plan.memory, states, strict=True):
            ratio = sum(counts[stage] for stage in held) / sum(plan.split.counts[stage] for stage in held)
            if replace(now, zero=state, activations=now.activations * max(1.0, ratio)).total > limit:
                return False
        return True

    def _measured(self, costs: CostModel, vector: Sequence[float]) -> tuple[CostModel, ...]:
        """Return ``costs`` with each replica's durations of a vector, and with the jitter that was measured last."""
        of, stages = self._deviation.of_replica, self._deviation.num_stages
        found = []
        for replica in range(self._deviation.replicas):
            measured = with_measured(costs, of(vector, replica), of(self._first, replica), self._num_sites)
            jitters = self._jitters[replica * stages : (replica + 1) * stages]
            links = self._jitters[self._deviation.replicas * stages :]
            found.append(with_jitter(measured, jitters, links, self._num_sites))
        return tuple(found)

    def _obstacle(self) -> str:
        """Return why micro-batches cannot be moved between replicas, or an empty string."""
        zero = self._engine.weft.zero
        if zero.reduce_every and zero.stage >= 2:
            return f"zero.reduce_every={zero.reduce_every} needs as many reductions on each replica"
        return "" if self._engine.deal.is_possible else "the data iterator has no method deal(counts)"

    def _change(self, step: int) -> None:
        """Run the proposed schedule from the next step on, and print why."""
        engine, deviation = self._engine, self._deviation
        proposal = from_rank_zero(self._result, Proposal)
        self._is_planning = False
        named = [f"{name} takes {ratio:.2f} times as long" for name, ratio in deviation.changes().items()]
        if len(named) > _MOST_NAMED:
            named[_MOST_NAMED:] = [f"{len(named) - _MOST_NAMED} more"]
        deviation.planned(step)
        if proposal is None:
            return
        self.proposals.append((step, proposal))
        if engine.global_rank == 0:
            print(f"adapt: after step {step}: {', '.join(named)}\n{proposal.text()}", flush=True)
            if self.on_restart is not None:
                self.on_restart(self._next_attempt(step, proposal, ", ".join(named)), proposal.moved_costs)
        if proposal.chosen != "none":
            self._run(proposal)

    def _next_attempt(self, step: int, proposal: Proposal, reason: str) -> NextAttempt:
        """Return what the next checkpoint changes."""
        pipeline, placement = self._engine.weft.pipeline, self._engine.plan.placement
        best, arguments = proposal.restarts[:1], tuple[str, ...]()
        if "layers" in proposal.restarts:
            layers = proposal.moved
            names = (name for name, each in open_placements(pipeline, placement.sites).items() if each == placement)
            arguments = f"pipeline.layers={[*layers]}", f"pipeline.placement={next(names)}"
        return NextAttempt(
            after_step=step, reason=reason, slow_ranks=self._slow if best == ("evict",) else (), arguments=arguments
        )

    def _run(self, proposal: Proposal) -> None:
        """Make the proposed schedule and number of micro-batches those of all later steps on this rank."""
        engine, costs = self._engine, self.costs()
        self._schedules, self._counts = proposal.schedules, proposal.counts
        own = {1: schedule_for(proposal.schedules, proposal.counts[engine.replica])}
        plan = replace(engine.plan, schedules=own, step_s=proposal.step_s())
        predicted = plan.predicted(engine.line, costs)
        engine.plan = replace(plan, bubble_share=predicted.bubble_share)
        engine.run_schedules(*({1: schedule} for schedule in proposal.schedules), counts=proposal.counts)
        if engine.bubbles is not None:
            engine.bubbles.replan(predicted.compute[engine.pipe_rank])
        if self.on_change is not None:
            measured = self._measured(plan.costs, self._deviation.reference)
            alike_costs = alike(measured, plan.placement)
            step, counts = engine.global_steps, self._counts
            self.on_change(ReplicaPlans(step=step, schedules=self._schedules, counts=counts, costs=alike_costs))

    def _result(self) -> Proposal | None:
        """Return rank 0's plan, or None if planning has failed: training goes on as before."""
        try:
            if self._replanning is None:
                raise ValueError("no process could be started")
            return self._replanning.result()
        except ValueError as error:
            print(f"adapt: no other schedule was planned: {error}", flush=True)
            return None
        finally:
            self._replanning = None


def _fixed_shares(plan: RunPlan) -> tuple[float, ...]:
    """Return the share of each stage's weights that an embedding or a head uses for each token."""
    sizes, model = stage_sizes(plan.facts.model, plan.split), plan.facts.model
    shares = [0.0] * len(sizes)
    for stage, part in ((0, model.before), (-1, model.after)):
        shares[stage] += part.active / max(1, sizes[stage].active)
    return tuple(shares)


def _until_weight(stage: StageCost) -> StageCost:
    return replace(stage, weight_saved_bytes=max(stage.weight_saved_bytes, stage.activation_bytes))


def slot_seconds(records: Iterable[StepRecord], clock: Clock) -> Mapping[tuple[Op, int], list[float]]:
    """Return the seconds of each computation, by operation and stage. Strand pairs are left out."""
    seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for record in records:
        for mark in record.marks:
            if len(mark.slot) == 1 and mark.slot[0].op in COMPUTE:
                op, stage, _ = mark.slot[0]
                seconds[op, stage].append(clock.seconds(mark.start, mark.end))
    return seconds
