"""Real ranks in rotation: each runs with the measured costs of the others, until the steps agree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from weft.comm.emulated.operation_log import EmulationError
from weft.comm.emulated.world import VALUES
from weft.engine.planning.run_plan import RunPlan
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.recipes.emulation.classes import RankClass, classes_of, representatives
from weft.recipes.emulation.job import EmulatedJob, hosts_of
from weft.recipes.emulation.session import Prepared, Setting, Turn, serve
from weft.recipes.emulation.what_if import WhatIf
from weft.tools.children import Child

AGREED = 0.02
"""Largest relative change of the step from one round to the next at which real ranks agree."""
MOST_ROUNDS = 4
TRIAL_STEPS = 3
"""Number of measured steps of a turn, except in the last round."""


class RealRank:
    """A real rank in its own process, which ends with this process."""

    def __init__(self, job: EmulatedJob, rank: int, size: int, setting: Setting) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.rank = rank
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        self._child = Child(f"real rank {rank}", serve, job, rank, size, setting, threads)
        self.prepared: Prepared = self._result()

    def ask(self, order: str, *args: Any) -> Any:
        """Send a command to the rank's `Session`, and wait for the result.

        Raises:
            EmulationError: the rank's process has ended.
            ValueError: the command has failed.
        """
        self._child.send((order, args))
        return self._result()

    def close(self) -> None:
        """Kill the rank's process."""
        self._child.kill()

    def _result(self) -> Any:
        try:
            done, value = self._child.receive(None)
        except RuntimeError:
            raise EmulationError(f"real rank {self.rank} has ended without an error; see its output") from None
        if not done:
            raise value
        return value


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """The result of an emulation.

    Attributes:
        classes: the classes of the job's ranks.
        real: the class of each real rank.
        turns: the last turn of each real rank.
        rounds: seconds of a step in each round.
        costs: measured costs of a pipeline's virtual stages.
        set_up_s: seconds of each real rank's set-up.
    """

    plan: RunPlan
    classes: list[RankClass]
    real: list[RankClass]
    turns: list[Turn]
    rounds: list[float]
    costs: CostModel
    set_up_s: list[float]

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median over the real ranks' median steps."""
        return median(median(turn.step_s) for turn in self.turns)

    @property
    def change(self) -> float:
        """Relative change of the step in the last round, or 0 if there was only one round."""
        return abs(self.rounds[-1] / self.rounds[-2] - 1) if len(self.rounds) > 1 else 0.0

    @property
    def agreed(self) -> bool:
        """True if the step changed by at most `AGREED` in the last round."""
        return self.change <= AGREED


def emulate(
    job: EmulatedJob,
    size: int,
    setting: Setting,
    *,
    steps: int,
    most: int = 16,
    real: Sequence[int] = (),
    at_once: int = 1,
) -> Emulation:
    """Emulate a job of ``size`` ranks once. See `emulated` for further arguments and errors.

    Args:
        steps: number of steps in the final measurement.
    """
    with emulated(job, size, setting, most=most, real=real, at_once=at_once) as measure:
        return measure(steps)


@contextmanager
def emulated(
    job: EmulatedJob,
    size: int,
    setting: Setting,
    *,
    most: int = 16,
    real: Sequence[int] = (),
    at_once: int = 1,
) -> Iterator[Callable[[int], Emulation]]:
    """Context with the real ranks of a job of ``size`` ranks. It yields a function that measures a number of steps.

    Args:
        most: largest number of real ranks, if they are chosen automatically.
        real: global ranks to run for real. If it is empty, they are chosen.
        at_once: number of real ranks that run concurrently, each on its own core or device.

    Raises:
        EmulationError: an operation with an emulated rank or the delay model fails, a rank in ``real`` does not exist,
            or the ranks would not run on CPUs.
        ValueError: the ranks themselves reject the input.
    """
    _check(size, real)
    what_if = setting.what_if
    with ExitStack() as stack:

        def start(rank: int, recorded_values: Sequence[Any] | None) -> RealRank:
            started = RealRank(job, rank, size, replace(setting, recorded_values=recorded_values))
            stack.callback(started.close)
            return started

        first = start(real[0] if real else min(what_if.slow, default=0), None)
        plan = first.prepared.plan
        line = plan.layout.position(first.rank).line
        classes = classes_of(plan, hosts_of(job.config, setting.per_host), what_if.speed.get)
        chosen = _chosen(classes, plan, real, most, line, first.rank)
        recorded_values = first.prepared.log.answers[VALUES]
        ranks = [first if rank == first.rank else start(rank, recorded_values) for rank, _ in chosen]
        if first not in ranks:
            first.close()
        known = plan.costs if plan.costs.local != LinkCost() else replace(plan.costs, local=setting.inside)
        costs = ranks[0].ask("collectives", known)

        rounds: list[float] = []

        def measure(steps: int) -> Emulation:
            nonlocal costs, rounds
            rounds = rounds[-1:]
            while len(rounds) < MOST_ROUNDS:
                turns = _run(ranks, TRIAL_STEPS, costs, what_if, at_once)
                costs = _with_measured(costs, turns, [each for _, each in chosen], classes)
                rounds.append(median(median(turn.step_s) for turn in turns))
                if _agree(rounds, turns):
                    break
            turns = _run(ranks, steps, costs, what_if, at_once)
            rounds.append(median(median(turn.step_s) for turn in turns))
            return Emulation(
                plan=plan,
                classes=classes,
                real=[each for _, each in chosen],
                turns=turns,
                rounds=rounds,
                costs=costs,
                set_up_s=[rank.prepared.set_up_s for rank in ranks],
            )

        yield measure


def _check(size: int, real: Sequence[int]) -> None:
    if (device := os.environ.get("DS_ACCELERATOR", "cpu")) != "cpu":
        raise EmulationError(
            f"DS_ACCELERATOR={device}: the emulated clock delays the host, which does not delay a device's stream; "
            "emulate on CPUs (DS_ACCELERATOR=cpu), and set the device's relative speed with --what-if speed="
        )
    if wrong := [rank for rank in real if not 0 <= rank < size]:
        raise EmulationError(f"--real {wrong[0]}: there is no such rank; the job has ranks 0 to {size - 1}")


def _run(ranks: Sequence[RealRank], steps: int, costs: CostModel, what_if: WhatIf, at_once: int) -> list[Turn]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda rank: rank.ask("run", steps, costs, what_if), ranks))


def _agree(rounds: Sequence[float], turns: Sequence[Turn]) -> bool:
    """True if the step changed in the last round by at most `AGREED`, or by at most the spread of ``turns``."""
    spread = median((max(turn.step_s) - min(turn.step_s)) / median(turn.step_s) for turn in turns)
    return len(rounds) > 1 and abs(rounds[-1] / rounds[-2] - 1) <= max(AGREED, spread)


def _chosen(
    classes: list[RankClass], plan: RunPlan, real: Sequence[int], most: int, line: int, first: int
) -> list[tuple[int, RankClass]]:
    """Choose the real ranks, and return them with their classes. Ranks of pipeline replica ``line`` are preferred."""
    if real:
        return [(rank, next(each for each in classes if rank in each.ranks)) for rank in real]
    chosen = []
    for each in representatives(classes, most):
        own = plan.layout.lines_of(each.pipeline_rank)[line]
        chosen.append((own if own in each.ranks else each.ranks[0], each))
    return chosen


def _with_measured(
    costs: CostModel, turns: Sequence[Turn], real: Sequence[RankClass], classes: Sequence[RankClass]
) -> CostModel:
    """Return the costs, with the real ranks' measurements for all stages of ranks of the same kind."""
    stages = list(costs.stages)
    of_kind: dict[Any, list[dict[int, StageCost]]] = {}
    for turn, each in zip(turns, real, strict=True):
        of_kind.setdefault(each.kind, []).append({n: turn.stages[s] for n, s in enumerate(each.stages)})
    own = {stage: cost for turn in turns for stage, cost in turn.stages.items()}
    for each in classes:
        for number, stage in enumerate(each.stages):
            if stage in own:
                stages[stage] = own[stage]
            elif each.kind in of_kind:
                stages[stage] = _middle([measured[number] for measured in of_kind[each.kind]], costs.stages[stage])
    return replace(costs, stages=tuple(stages))


def _middle(measured: Sequence[StageCost], known: StageCost) -> StageCost:
    names = ("forward_s", "input_s", "weight_s", "step_s", "send_s")
    return replace(known, **{name: median(getattr(cost, name) for cost in measured) for name in names})
