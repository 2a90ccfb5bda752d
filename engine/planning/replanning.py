"""Planning again with measured costs, in another process: `python -m weft.engine.planning.replanning`. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from tempfile import TemporaryFile
from time import monotonic

from weft.comm.values import decode, encode
from weft.conf.host.processes import end_with_parent
from weft.conf.schema import PipelineConfig
from weft.engine.planning.schedules import plan_schedule
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate

LEAST_GAIN = 0.03
"""Share of the step that another schedule must save, by the simulator."""
MOST_S = 600.0
"""Seconds after which planning is given up."""
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
        config: settings; ``memory_cap_bytes`` is the cap of the schedule that runs.
        schedule: the lowered schedule that runs.
        measured: costs as measured.
        usual: costs before they changed.
        layers: number of layers of each virtual stage.
    """

    config: PipelineConfig
    schedule: Schedule
    measured: CostModel
    usual: CostModel
    layers: tuple[int, ...]
    replicas: int
    zero_stage: int


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The result of a plan.

    Attributes:
        schedule: the schedule for the next steps, which may be the one that runs.
        chosen: name of the level that is carried out: none or schedule.
        levels: all levels, the carried-out ones first.
    """

    schedule: Schedule
    chosen: str
    levels: tuple[Level, ...]

    def text(self) -> str:
        """Return one line per level, with the chosen one marked."""
        marks = {self.chosen: "chosen"}
        lines = [
            f"  {level.name:<12} {level.step_s:.4g} s  {marks.get(level.name, level.remedy)}".rstrip()
            for level in self.levels
        ]
        return "\n".join(lines)

    def step_s(self) -> float:
        """Return the simulated step of the chosen level."""
        return next(level.step_s for level in self.levels if level.name == self.chosen)


def propose(request: Request) -> Proposal:
    """Plan a schedule with the measured costs, and price all levels. Deterministic.

    Raises:
        ValueError: no schedule fits under the cap.
    """
    now, costs = request.schedule, request.measured
    found = _planned(request, costs, request.config.search_seconds)
    none = Level(name="none", step_s=_step_s(now, costs))
    other = Level(name="schedule", step_s=_step_s(found, costs))
    replans = other.step_s <= (1.0 - LEAST_GAIN) * none.step_s
    advice = [_microbatches(request, none), _layers(request)]
    usual_s = _step_s(now, request.usual)
    advice.append(Level(name="evict", step_s=usual_s, remedy="weft evict the slow host, or repair the link"))
    return Proposal(
        schedule=found if replans else now,
        chosen=(other if replans else none).name,
        levels=(none, other, *(level for level in advice if level is not None)),
    )


def _planned(request: Request, costs: CostModel, search_seconds: float) -> Schedule:
    return plan_schedule(
        replace(request.config, search_seconds=search_seconds),
        request.schedule.placement,
        num_microbatches=request.schedule.num_microbatches,
        costs=costs,
        zero_stage=request.zero_stage,
    )


def _step_s(schedule: Schedule, costs: CostModel) -> float:
    return simulate(schedule, costs).step_s


def _microbatches(request: Request, none: Level) -> Level | None:
    """Price micro-batches that a slow replica hands to the others, by the work of the busiest rank for each of them."""
    others = request.replicas - 1
    if not others:
        return None
    slow_s, usual_s = (_pace_s(request.schedule, costs) for costs in (request.measured, request.usual))
    usual_step_s = _step_s(request.schedule, request.usual)
    step_s, moved = min(
        (max(none.step_s - count * slow_s, usual_step_s + ceil(count / others) * usual_s), count)
        for count in range(request.schedule.num_microbatches)
    )
    remedy = f"{moved} micro-batches of the slow replica; Weft does not move them" if moved else "none to move"
    return Level(name="microbatches", step_s=step_s, remedy=remedy)


def _pace_s(schedule: Schedule, costs: CostModel) -> float:
    """Return the seconds that one micro-batch takes on the busiest rank."""
    return max(sum(_compute_s(costs.stages[stage]) for stage in held) for held in schedule.placement.rank_stages)


def _compute_s(stage: StageCost) -> float:
    return stage.forward_s + stage.input_s + stage.weight_s


def _layers(request: Request) -> Level | None:
    """Price another division of the layers, which a checkpoint can be resumed with, or return None without one."""
    counts = divided(request)
    if counts == request.layers:
        return None
    stages = tuple(
        _scaled(stage, new / old) if old else stage
        for stage, new, old in zip(request.measured.stages, counts, request.layers, strict=True)
    )
    costs = replace(request.measured, stages=stages)
    try:
        step_s = _step_s(_planned(request, costs, 0.0), costs)
    except ValueError:  # a rank would exceed the cap
        return None
    return Level(name="layers", step_s=step_s, remedy=f"pipeline.layers={[*counts]} at the next checkpoint")


def divided(request: Request) -> tuple[int, ...]:
    """Return numbers of layers of the stages with which ranks take about equally long."""
    ranks = request.schedule.placement.stage_ranks
    each = [_compute_s(s) / n if n else 0.0 for s, n in zip(request.measured.stages, request.layers, strict=True)]
    counts = [min(1, n) for n in request.layers]
    for _ in range(sum(request.layers) - sum(counts)):
        busy = [0.0] * request.schedule.num_ranks
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
