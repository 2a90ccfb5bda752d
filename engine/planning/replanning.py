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
from weft.engine.planning.layer_moves import largest, with_layers
from weft.engine.planning.schedules import plan_schedule
from weft.pipeline.costs import CostModel
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
UNSUPERVISED = "the run is not supervised (supervise.enabled=true)"
"""Obstacle of levels that need a restart."""
_MOST_LISTED = 8
_NICENESS = 10  # with 19, beside programs that keep all cores busy, a plan took minutes


@dataclass(frozen=True, kw_only=True)
class Level:
    """A way to adapt, with its price.

    Attributes:
        name: none, schedule, microbatches, layers or evict.
        step_s: simulated seconds of a step.
        remark: what the level changes, and why it is not carried out.
    """

    name: str
    step_s: float
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A restart from the next checkpoint.

    Attributes:
        seconds: price of the restart.
        steps_left: steps of the run after that checkpoint.
        obstacle: why a restart is not possible, or empty if it is.
    """

    seconds: float = 0.0
    steps_left: int = 0
    obstacle: str = ""


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
        fixed: share of each stage's time that an embedding or a head takes.
        moved: numbers of layers by `balanced_layers`, or empty if those are the same.
        has_slow_rank: True if a rank has become slower, and not only links.
        obstacle: why micro-batches cannot be moved, or empty if they can.
        restart: price of a restart, which other numbers of layers or other hosts need.
    """

    config: PipelineConfig
    schedules: tuple[Schedule, ...]
    counts: tuple[int, ...]
    measured: tuple[CostModel, ...]
    usual: tuple[CostModel, ...]
    layers: tuple[int, ...]
    fixed: tuple[float, ...]
    zero_stage: int
    moved: tuple[int, ...] = ()
    has_slow_rank: bool = False
    obstacle: str = ""
    restart: Restart = Restart(obstacle=UNSUPERVISED)

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
        chosen: name of the level that is carried out at once: none, schedule or microbatches.
        restarts: names of the levels that are worth a restart at the next checkpoint, the shortest step first.
        levels: all levels, those without a restart first.
        moved, moved_costs: other numbers of layers, and a replica's costs with them, if there are any.
    """

    schedules: tuple[Schedule, ...]
    counts: tuple[int, ...]
    chosen: str
    levels: tuple[Level, ...]
    restarts: tuple[str, ...] = ()
    moved: tuple[int, ...] = ()
    moved_costs: CostModel | None = None

    def text(self) -> str:
        """Return one line per level, with the chosen one marked."""
        lines = []
        for level in self.levels:
            remarks = "; ".join(filter(None, ("chosen" * (level.name == self.chosen), level.remark)))
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
    who = "a spare, if one waits, replaces the slow host" if request.has_slow_rank else "repair the link"
    restarting, moved_costs = [Level(name="evict", step_s=usual_s, remark=who)], None
    if request.moved:
        moved_costs = with_layers(largest(request.measured), request.layers, request.fixed, moved=request.moved)
        with suppress(ValueError):  # a rank would exceed the cap
            restarting.insert(0, _layers(request, moved_costs))
    obstacles = [_obstacle(request, chosen.level, level) for level in restarting]
    worth = [level for level, why in zip(restarting, obstacles, strict=True) if not why]
    return Proposal(
        schedules=chosen.schedules,
        counts=chosen.counts,
        chosen=chosen.level.name,
        levels=(*(option.level for option in options), *map(_with_obstacle, restarting, obstacles)),
        restarts=tuple(level.name for level in sorted(worth, key=lambda level: level.step_s)),
        moved=request.moved,
        moved_costs=moved_costs,
    )


def _obstacle(request: Request, chosen: Level, level: Level) -> str:
    """Return why a level is not worth a restart, or an empty string if it is."""
    restart, saved_s = request.restart, chosen.step_s - level.step_s
    if level.name == "evict" and not request.has_slow_rank:
        return "no rank is slow"
    if saved_s < LEAST_GAIN * chosen.step_s:
        return f"it saves less than {LEAST_GAIN:.0%}"
    if restart.obstacle or saved_s * restart.steps_left > restart.seconds:
        return restart.obstacle
    return f"a restart takes {restart.seconds:.3g} s, and {restart.steps_left} steps are left"


def _with_obstacle(level: Level, why: str) -> Level:
    return replace(level, remark=f"{level.remark}; {f'not carried out: {why}' if why else 'at the next checkpoint'}")


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
    slowest = {replica: each for group in groups for each in [largest([costs[r] for r in group])] for replica in group}
    return tuple(slowest[replica] for replica in range(len(costs)))


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
    remark = f"replicas read {_text(counts)}" if moves else "none to move"
    remark += f"; not carried out: {why}" if moves and why else ""
    level = Level(
        name="microbatches", step_s=_step_s(counts, schedules, costs, request.config.jitter_samples), remark=remark
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
        slowest = largest([cost for cost, own in zip(costs, counts, strict=True) if own == count])
        schedule = _plan(request, count, slowest, request.config.search_seconds)
        if schedules:
            ordered = reduce_in_order(schedule, reduction_order(schedules[0]))
            with suppress(ScheduleError):
                validate(ordered, costs=slowest, memory_cap_bytes=float(request.config.memory_cap_bytes) or None)
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


def _layers(request: Request, costs: CostModel) -> Level:
    """Price other numbers of layers. Raise ValueError if a rank would exceed the cap."""
    count = sum(request.counts) // len(request.counts)
    step_s = _simulated_s(_plan(request, count, costs, 0.0), costs, request.config.jitter_samples)
    return Level(name="layers", step_s=step_s, remark=f"pipeline.layers={[*request.moved]}")


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
