"""A real rank of an emulated job in its own process. It is set up once, and then runs steps on command."""

from __future__ import annotations

import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from weft.comm.collectives.costs import AlphaBeta
from weft.comm.collectives.group import LinkClass
from weft.comm.emulated.operation_log import EmulationError, OperationLog, Recorder
from weft.comm.emulated.step import Call
from weft.comm.emulated.world import VALUES, EmulatedWorld
from weft.comm.job import GatherPurpose
from weft.engine.layout import RankLayout
from weft.engine.planning.estimates import stage_sizes
from weft.engine.planning.run_plan import RunPlan
from weft.pipeline.action import slot_text
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.profile import fit_costs
from weft.pipeline.timeline import COMPUTE_LANE, Timeline
from weft.recipes.emulation.delays import CheckedDelays, Job, delay_model
from weft.recipes.emulation.job import EmulatedJob, hosts_of, sites_of
from weft.recipes.emulation.step import TwinStep
from weft.recipes.emulation.tensor_peak import TensorPeak
from weft.recipes.emulation.what_if import WhatIf

WARM_UP = 2
"""Steps of the first turn that are not measured, because they create connections, caches and buffers.

Later turns leave out one step.
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of all real ranks of an emulation.

    Attributes:
        delays: name of the delay model.
        per_host: ranks per host, if there is no hostfile.
        inside: cost of a link inside a host.
        between: cost of a link between hosts of a site.
        recorded_values: values that all ranks receive from rank 0, in order, as recorded from another real rank. None
            for the first.
        expected: recorded messages of a rank with the settings of all others, to compare with. None does not compare.
    """

    delays: str
    per_host: int
    inside: LinkCost
    between: LinkCost
    what_if: WhatIf
    recorded_values: Sequence[Any] | None = None
    expected: OperationLog | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Result of the set-up of a real rank.

    Attributes:
        set_up_s: seconds that the set-up took.
        log: recorded messages of the set-up.
    """

    plan: RunPlan
    set_up_s: float
    log: OperationLog


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Measurements of a few steps of a real rank.

    Attributes:
        step_s: seconds of each step.
        stages: measured costs of its virtual stages.
        actions: median seconds of each computation in a step.
        busy_s: seconds per step in which the rank computed.
        twin_s: seconds per step that the twin took, which the clock excludes.
        planned_bytes, peak_bytes: peak of its tensors, by the plan and by the record of the set-up and the first steps.
        log: recorded messages of the rank.
    """

    rank: int
    step_s: tuple[float, ...]
    stages: Mapping[int, StageCost]
    actions: Mapping[str, float]
    busy_s: float
    twin_s: float
    planned_bytes: float
    peak_bytes: int
    log: OperationLog


class Session:
    """A real rank with its engine, in an emulated world."""

    def __init__(self, job: EmulatedJob, rank: int, size: int, setting: Setting) -> None:
        begun = perf_counter()
        self._job, self._setting = job, setting
        layout = RankLayout.of(job.config, size)
        answers = None if setting.recorded_values is None else {VALUES: setting.recorded_values}
        self.world = EmulatedWorld(
            rank=rank,
            size=size,
            hosts=hosts_of(job.config, setting.per_host),
            sites=sites_of(layout),
            recorder=Recorder(rank, setting.expected, answers),
        )
        self.world.answers[GatherPurpose.timeline] = _unknown_timeline
        self.world.answers[GatherPurpose.tied] = self._tied_of
        self.world.join()
        self._peak: TensorPeak | None = TensorPeak()
        self._peak_bytes = 0
        self.engine = job.engine()
        self.plan: RunPlan = self.engine.plan
        self._warm_up = WARM_UP
        self._delays = self._make_delays()
        self.world.collective_s = self._delays.collective_s
        self.prepared = Prepared(plan=self.plan, set_up_s=perf_counter() - begun, log=self.world.recorder.log)

    def run(self, steps: int, costs: CostModel, what_if: WhatIf, seed: int = 0) -> Turn:
        """Train and measure ``steps`` steps, after some steps that are not measured.

        Args:
            costs: costs of the virtual stages of one pipeline, without the changes of ``what_if``.
            what_if: what-if conditions of the emulated ranks.
            seed: random seed of jitter and losses.
        """
        world, engine = self.world, self.engine
        step = TwinStep(world, self.plan, what_if.costs(costs), self._delays, what_if, seed)
        engine.slot_observers.insert(0, step)
        ends, twin_s = [], world.clock.twin_s
        warm_up, self._warm_up = self._warm_up, 1
        try:
            for number in range(warm_up + steps):
                if number == warm_up and self._peak is not None:
                    self._peak_bytes, self._peak = self._peak.stop(), None
                engine.train_batch()
                ends.append(world.clock.now())
        finally:
            engine.slot_observers.remove(step)
        schedule = engine.schedule
        timelines = step.timelines(schedule, warm_up)
        fitted = fit_costs(timelines, costs).stages
        own_s = median(step.step_s[warm_up:])
        held = self.plan.placement.rank_stages[engine.pipe_rank]
        stages = {
            stage: replace(
                fitted[stage],
                reduce_s=costs.stages[stage].reduce_s,
                unshard_s=costs.stages[stage].unshard_s,
                step_s=own_s / len(held),
            )
            for stage in held
        }
        busy = [sum(s.end_s - s.start_s for s in line.spans if s.lane == COMPUTE_LANE) for line in timelines]
        return Turn(
            rank=world.rank,
            step_s=tuple(b - a for a, b in zip(ends[warm_up - 1 :], ends[warm_up:], strict=False)),
            stages=stages,
            actions=_medians(timelines),
            busy_s=median(busy),
            twin_s=(world.clock.twin_s - twin_s) / (warm_up + steps),
            planned_bytes=self.plan.memory[engine.pipe_rank].total,
            peak_bytes=self._peak_bytes,
            log=world.recorder.log,
        )

    def collectives(self, costs: CostModel) -> CostModel:
        """Return the costs with reductions and gathers of each stage replaced by the delay model's seconds."""
        layout, sizes = self.plan.layout, stage_sizes(self.plan.facts.model, self.plan.split)
        ranks = layout.data_groups(0)[0]
        if len(ranks) == 1:
            return costs
        zero = self._job.config.zero.stage
        hosts = hosts_of(self._job.config, self._setting.per_host)
        spread = len({hosts(rank) for rank in ranks}), (0,)

        def seconds(operation: str, num_bytes: int) -> float:
            return self._delays.collective_s(Call(operation, ranks, *spread, num_bytes))

        stages = tuple(
            replace(
                stage,
                reduce_s=seconds("reduce_scatter" if zero else "all_reduce", 4 * size.trained),
                unshard_s=seconds("all_gather", 4 * (size.parameters if zero == 3 else size.trained)) if zero else 0.0,
            )
            for stage, size in zip(costs.stages, sizes, strict=True)
        )
        return replace(costs, stages=stages)

    def _make_delays(self) -> CheckedDelays:
        setting, facts = self._setting, self.plan.facts
        job = Job(
            num_ranks=self.world.size,
            collectives=facts.collectives,
            links={LinkClass.intra: _line(setting.inside), LinkClass.inter: _line(setting.between)},
            costs=setting.what_if.costs(self.plan.costs),
        )
        name, make = delay_model(setting.delays)
        return CheckedDelays(name, make, job)

    def _tied_of(self, rank: int, mine: dict[str, bool]) -> dict[str, bool]:
        """Return the tied parameters of another rank.

        A rank with the first or the last stage has the same ones as this rank. Others have none.
        """
        plan = next(value for value in reversed(self.world.recorder.log.answers[VALUES]) if isinstance(value, RunPlan))
        ranks = plan.placement.stage_ranks
        return mine if plan.layout.position(rank).stage in (ranks[0], ranks[-1]) else {}


def _unknown_timeline(rank: int, mine: Any) -> Any:
    raise EmulationError(f"rank {rank} is emulated and has measured nothing; `weft emulate` prints what is known of it")


def _medians(timelines: Sequence[Timeline]) -> dict[str, float]:
    seconds = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            if span.lane == COMPUTE_LANE:
                seconds[slot_text(span.slot)].append(span.end_s - span.start_s)
    return {action: median(values) for action, values in seconds.items()}


def _line(link: LinkCost) -> AlphaBeta:
    return AlphaBeta(link.latency_s, 8 / link.bandwidth_bps)


def serve(
    send: Callable, receive: Callable, job: EmulatedJob, rank: int, size: int, setting: Setting, threads: int
) -> None:
    """Run the process of a real rank, which answers commands until it is killed."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    try:
        session = Session(job, rank, size, setting)
        send((True, session.prepared))
        while True:
            name, args = receive()
            send((True, getattr(session, name)(*args)))
    except (EOFError, KeyboardInterrupt):
        pass
    except ValueError as error:
        send((False, error if isinstance(error, EmulationError) else ValueError(str(error))))
    except Exception as error:
        traceback.print_exc()
        send((False, EmulationError(f"real rank {rank} failed: {type(error).__name__}: {error}")))
