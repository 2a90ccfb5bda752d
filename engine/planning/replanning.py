"""Planning again with measured costs, in another process: `python -m weft.engine.planning.replanning`. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from statistics import fmean
from tempfile import TemporaryFile
from time import monotonic
from typing import NamedTuple

from weft.comm.values import decode, encode
from weft.conf.host.processes import end_with_parent
from weft.conf.schema import PipelineConfig
from weft.engine.planning.deviation import TOLERANCE
from weft.engine.planning.schedules import plan_schedule
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.jitter import has_jitter
from weft.pipeline.lowering import reduce_in_order, reduction_order
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule, ScheduleError
from weft.pipeline.simulation import sampled_steps_s, simulate
from weft.pipeline.validation import validate

LEAST_GAIN = 0.03
"""Share of the step that another schedule must save, by the simulator."""
MOST_S = 600.0
"""Seconds after which planning is given up."""
_MOST_LISTED = 8
_NICENESS = 10  # with 19, beside programs that keep all cores busy, a plan took minutes
_SECONDS = ("forward_s", "input_s", "weight_s", "step_s")


@dataclass(frozen=True, kw_only=True)
class Level:
    """A way to adapt, with its price.

    Attributes:
        name: none, schedule, microbatches, layers or evict.
        step_s: simulated seconds of a step.
        remedy: what the user may set, or empty for a level that needs no user.
    """

    name: str
    step_s: float
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The input of a plan.

    Attributes:
        config: settings; ``memory_cap_bytes`` is the cap of the schedules.
        schedules: the lowered schedules that run, one for each number in ``counts``.
        counts: micro-batches of each replica.
        measured: each replica's costs as measured.
        usual: each replica's costs before they changed.
        layers: number of layers of each virtual stage.
        obstacle: why micro-batches cannot be moved, or empty if they can.
    """

    config: PipelineConfig
    schedules: tuple[Schedule, ...]
    counts: tuple[int, ...]
    measured: tuple[CostModel, ...]
    usual: tuple[CostModel, ...]
    layers: tuple[int, ...]
    zero_stage: int
    obstacle: str = ""

    @property
    def placement(self) -> Placement:
        """The placement of all schedules."""
        return self.schedules[0].placement


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The result of a plan.

    Attributes:
        schedules: the schedules for the next steps, one for each number in ``counts``. They may be those that run.
        counts: micro-batches of each replica.
        chosen: name of the level that is carried out: none, schedule or microbatches.
        levels: all levels, those that Weft carries out first.
    """

    schedules: tuple[Schedule, ...]
    counts: tuple[int, ...]
    chosen: str
    levels: tuple[Level, ...]

    def text(self) -> str:
        """Return one line per level, with the chosen one marked."""
        lines = []
        for level in self.levels:
            remarks = "; ".join(filter(None, ("chosen" * (level.name == self.chosen), level.remedy)))
            lines.append(f"  {level.name:<12} {level.step_s:.4g} s  {remarks}".rstrip())
        return "\n".join(lines)

    def step_s(self) -> float:
        """Return the simulated step of the chosen level."""
        return next(level.step_s for level in self.levels if level.name == self.chosen)


class _Option(NamedTuple):
    """A level that Weft can carry out, if `is_possible`."""

    level: Level
    counts: tuple[int, ...]
    schedules: tuple[Schedule, ...]
    is_possible: bool = True


def propose(request: Request) -> Proposal:
    """Plan schedules with the measured costs, and price all levels. Deterministic.

    A level is chosen only if it saves at least `LEAST_GAIN` of the step of the level that is chosen without it.

    Raises:
        ValueError: no schedule fits under the cap.
    """
    costs, counts, samples = alike(request.measured, request.placement), request.counts, request.config.jitter_samples
    found = _planned(request, counts, costs)
    options = [
        _Option(
            Level(name="none", step_s=_step_s(counts, request.schedules, costs, samples)), counts, request.schedules
        ),
        _Option(
            Level(name="schedule", step_s=_step_s(counts, found, costs, samples)), counts, found, _reduce_alike(found)
        ),
        *_moved(request, costs),
    ]
    chosen = options[0]
    for option in options[1:]:
        if option.is_possible and option.level.step_s <= (1.0 - LEAST_GAIN) * chosen.level.step_s:
            chosen = option
    usual_s = _step_s(counts, request.schedules, alike(request.usual, request.placement), samples)
    evict = Level(name="evict", step_s=usual_s, remedy="weft evict the slow host, or repair the link")
    advice = (level for level in (_layers(request), evict) if level is not None)
    return Proposal(
        schedules=chosen.schedules,
        counts=chosen.counts,
        chosen=chosen.level.name,
        levels=(*(option.level for option in options), *advice),
    )


def schedule_for(schedules: Sequence[Schedule], count: int) -> Schedule:
    """Return the schedule of a replica with ``count`` micro-batches."""
    return next(schedule for schedule in schedules if schedule.num_microbatches == count)


def alike(costs: Sequence[CostModel], placement: Placement) -> tuple[CostModel, ...]:
    """Return the costs of each replica, equal for replicas that take about as long: the largest of theirs."""
    paces = [_pace_s(placement, each) for each in costs]
    groups: list[list[int]] = []
    for replica in sorted(range(len(costs)), key=paces.__getitem__):
        if not groups or paces[replica] > (1.0 + TOLERANCE) * paces[groups[-1][0]]:
            groups.append([])
        groups[-1].append(replica)
    largest = {replica: each for group in groups for each in [_largest([costs[r] for r in group])] for replica in group}
    return tuple(largest[replica] for replica in range(len(costs)))


def _largest(costs: Sequence[CostModel]) -> CostModel:
    """Return costs with the longest seconds of each stage."""
    stages = [
        replace(each[0], **{name: max(getattr(stage, name) for stage in each) for name in (*_SECONDS, "jitter")})
        for each in zip(*(one.stages for one in costs), strict=True)
    ]
    return replace(costs[0], stages=tuple(stages))


def shares(count: int, paces: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Return micro-batches for each replica, ``count`` on average, with which the slowest replica's step is shortest.

    Each gets from 1 to twice ``count``. Replicas of one pace get equal numbers, as far as possible.

    Args:
        paces: seconds of each replica's step without micro-batches, and seconds of each micro-batch.
    """
    counts = [1] * len(paces)
    waiting = [(start_s + 2 * pace_s, 2, replica) for replica, (start_s, pace_s) in enumerate(paces)]
    heapify(waiting)
    for _ in range((count - 1) * len(paces)):
        _, number, replica = heappop(waiting)
        counts[replica] = number
        if number < 2 * count:
            start_s, pace_s = paces[replica]
            heappush(waiting, (start_s + (number + 1) * pace_s, number + 1, replica))
    return tuple(counts)


def _moved(request: Request, costs: Sequence[CostModel]) -> Iterator[_Option]:
    """Yield the level that moves micro-batches between replicas, if there are several."""
    if len(costs) == 1:
        return
    paces = []
    for count, cost in zip(request.counts, costs, strict=True):
        pace_s = _pace_s(request.placement, cost)
        paces.append((simulate(schedule_for(request.schedules, count), cost).step_s - count * pace_s, pace_s))
    counts = shares(sum(request.counts) // len(costs), paces)
    moves = counts != request.counts
    schedules = _planned(request, counts, costs) if moves else request.schedules
    why = request.obstacle or ("" if _reduce_alike(schedules) else "replicas would reduce gradients in other orders")
    remedy = f"replicas read {_text(counts)}" if moves else "none to move"
    remedy += f"; not carried out: {why}" if moves and why else ""
    level = Level(
        name="microbatches", step_s=_step_s(counts, schedules, costs, request.config.jitter_samples), remedy=remedy
    )
    yield _Option(level, counts, schedules, moves and not why)


def _text(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) if len(counts) <= _MOST_LISTED else f"{min(counts)} to {max(counts)}"


def _reduce_alike(schedules: Sequence[Schedule]) -> bool:
    """True if each rank reduces the gradients of its stages in the same order in all schedules."""
    return len(set(map(reduction_order, schedules))) == 1


def _step_s(counts: Sequence[int], schedules: Sequence[Schedule], costs: Sequence[CostModel], samples: int) -> float:
    """Return the simulated seconds of the slowest replica's step."""
    different = {(count, id(cost)): cost for count, cost in zip(counts, costs, strict=True)}
    return max(_simulated_s(schedule_for(schedules, count), cost, samples) for (count, _), cost in different.items())


def _simulated_s(schedule: Schedule, costs: CostModel, samples: int) -> float:
    """Return the mean seconds of a step over samples that no plan is made with, or without jitter those by medians."""
    if not samples or not has_jitter(costs):
        return simulate(schedule, costs).step_s
    return fmean(sampled_steps_s(schedule, costs, range(-samples, 0)))


def _planned(request: Request, counts: Sequence[int], costs: Sequence[CostModel]) -> tuple[Schedule, ...]:
    """Return a schedule for each number of micro-batches, planned with the costs of its slowest replica.

    All reduce gradients in the order of the first one, if memory allows.
    """
    schedules: list[Schedule] = []
    for count in sorted(set(counts)):
        largest = _largest([cost for cost, own in zip(costs, counts, strict=True) if own == count])
        schedule = _plan(request, count, largest, request.config.search_seconds)
        if schedules:
            ordered = reduce_in_order(schedule, reduction_order(schedules[0]))
            with suppress(ScheduleError):
                validate(ordered, costs=largest, memory_cap_bytes=float(request.config.memory_cap_bytes) or None)
                schedule = ordered
        schedules.append(schedule)
    return tuple(schedules)


def _plan(request: Request, count: int, costs: CostModel, search_seconds: float) -> Schedule:
    samples = request.config.jitter_samples if has_jitter(costs) else 0
    return plan_schedule(
        replace(request.config, search_seconds=search_seconds, jitter_samples=samples),
        request.placement,
        num_microbatches=count,
        costs=costs,
        zero_stage=request.zero_stage,
    )


def _pace_s(placement: Placement, costs: CostModel) -> float:
    """Return the seconds that one micro-batch takes on the busiest rank."""
    return max(sum(costs.stages[stage].compute_s for stage in held) for held in placement.rank_stages)


def _layers(request: Request) -> Level | None:
    """Price another division of the layers, which a checkpoint can be resumed with, or return None without one."""
    counts, slowest = divided(request), _largest(request.measured)
    if counts == request.layers:
        return None
    stages = tuple(
        _scaled(stage, new / old) if old else stage
        for stage, new, old in zip(slowest.stages, counts, request.layers, strict=True)
    )
    costs, count = replace(slowest, stages=stages), sum(request.counts) // len(request.counts)
    try:
        step_s = _simulated_s(_plan(request, count, costs, 0.0), costs, request.config.jitter_samples)
    except ValueError:  # a rank would exceed the cap
        return None
    return Level(name="layers", step_s=step_s, remedy=f"pipeline.layers={[*counts]} at the next checkpoint")


def divided(request: Request) -> tuple[int, ...]:
    """Return numbers of layers of the stages with which ranks take about equally long."""
    ranks, slowest = request.placement.stage_ranks, _largest(request.measured)
    each = [s.compute_s / n if n else 0.0 for s, n in zip(slowest.stages, request.layers, strict=True)]
    counts = [min(1, n) for n in request.layers]
    for _ in range(sum(request.layers) - sum(counts)):
        busy = [0.0] * request.placement.num_ranks
        for stage, rank in enumerate(ranks):
            busy[rank] += counts[stage] * each[stage]
        stages = [stage for stage, layers in enumerate(request.layers) if layers]
        counts[min(stages, key=lambda stage: (busy[ranks[stage]] + each[stage], counts[stage], stage))] += 1
    return tuple(counts)


def _scaled(stage: StageCost, ratio: float) -> StageCost:
    names = (*_SECONDS, "activation_bytes", "weight_saved_bytes")
    return replace(stage, **{name: getattr(stage, name) * ratio for name in names})


class Replanning:
    """A plan that another process makes, at a low priority, while this one trains."""

    def __init__(self, request: Request) -> None:
        self._began_s = monotonic()
        self._output = TemporaryFile()  # noqa: SIM115 (the process writes to it)
        with TemporaryFile() as text:
            text.write(encode(request))
            text.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=text, stdout=self._output, stderr=subprocess.PIPE
            )

    @property
    def has_ended(self) -> bool:
        """True if `result` will not wait."""
        if self._process.poll() is None and monotonic() - self._began_s > MOST_S:
            self._process.kill()
        return self._process.poll() is not None

    def result(self) -> Proposal:
        """Return the plan. Raise ValueError if planning failed, or took too long."""
        _, errors = self._process.communicate()
        if self._process.returncode:
            text = errors.decode(errors="replace").strip()
            raise ValueError(text.rpartition("\n")[2] or f"exit status {self._process.returncode}")
        self._output.seek(0)
        found: Proposal = decode(self._output.read(), (Proposal,))
        self._output.close()
        return found

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._process.kill()
        self._process.communicate()
        self._output.close()


def main(_: Sequence[str] = ()) -> int:
    """Read a request from standard input, and write the proposal."""
    end_with_parent()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # also if the trainer runs in real time
    os.nice(_NICENESS)
    request = decode(sys.stdin.buffer.read(), (Request,))
    sys.stdout.buffer.write(encode(propose(request)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
