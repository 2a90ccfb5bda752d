"""A rank of a layout: the predicted step and the measured steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from benchmarks.peers.case import EngineCase
from benchmarks.peers.stepping import time_steps
from benchmarks.peers.weft_engine import emulated_engine
from weft.conf.schema import WeftConfig
from weft.pipeline.cell import cell_step_s
from weft.pipeline.costs import StageCost
from weft.pipeline.profile import fit_costs
from weft.pipeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """The measurements of a rank.

    Attributes:
        step_s: seconds of each measured step, between the ends of consecutive steps.
        pipeline_s: seconds of each step from the first action to the last on any rank of the replica.
        predicted_s: step time predicted by the plan before the first step.
        told_s: step time predicted by the same plan with the measured seconds of the stages.
    """

    step_s: tuple[float, ...]
    pipeline_s: tuple[float, ...]
    predicted_s: float
    told_s: float


def profile_stages(case: EngineCase, config: WeftConfig) -> tuple[StageCost, ...]:
    """Train a few steps, and fit the costs of each virtual stage. A collective call."""
    engine = emulated_engine(case, config)
    try:
        time_steps(replace(case, num_warmup=0), engine.train_batch)
        found = fit_costs(engine.measured_timelines()[1:], engine.plan.costs).stages
        return tuple(replace(stage, reduce_s=0.0, unshard_s=0.0) for stage in found)
    finally:
        engine.destroy()


def measure(case: EngineCase, config: WeftConfig) -> RankSteps:
    """Train a few steps in a row. A collective call."""
    engine = emulated_engine(case, config)
    try:
        time_steps(replace(case, num_warmup=0, num_steps=case.num_warmup), engine.train_batch)
        step_s = time_steps(replace(case, num_warmup=0), engine.train_batch)
        timelines = engine.measured_timelines()[-case.num_steps :]
        fitted = fit_costs(timelines, engine.plan.step_costs)
        return RankSteps(
            step_s=step_s,
            pipeline_s=tuple(map(_between, timelines)),
            predicted_s=engine.plan.step_s,
            told_s=cell_step_s(engine.plan.schedule(), fitted),
        )
    finally:
        engine.destroy()


def _between(timeline: Timeline) -> float:
    """Return the seconds from the first action to the last."""
    return max(span.end_s for span in timeline.spans) - min(span.start_s for span in timeline.spans)


def slowest(ranks: list[RankSteps]) -> RankSteps:
    """Return the rank with the longest median step."""
    return max(ranks, key=lambda rank: median(rank.step_s))
