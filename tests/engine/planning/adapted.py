"""Runs whose measured costs are replaced, so that the schedule is planned again."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from time import sleep

import torch.distributed as dist

from tests.engine.tiny import begun
from weft.conf.schema import WeftConfig
from weft.engine.planning.adaptation import Adaptation
from weft.pipeline.memory import peak_bytes

FAST, SLOW = (0.01, 0.01, 0.01), (0.04, 0.002, 0.002)
CHANGED_AFTER, STEPS = 7, 14


def report(adaptation: Adaptation, slow_stage: int, changed: tuple[float, ...] = SLOW) -> None:
    """Make a rank report the same durations in all runs: of one stage others after `CHANGED_AFTER` steps."""

    def seconds() -> list[float]:
        engine = adaptation._engine
        has_changed = engine.global_steps > CHANGED_AFTER
        return [
            part if stage in engine.module.stages else 0.0
            for stage in range(engine.plan.placement.num_stages)
            for part in (changed if has_changed and stage == slow_stage else FAST)
        ]

    adaptation._stage_seconds = seconds


def train(config: WeftConfig, slow_stage: int, changed: tuple[float, ...] = SLOW, kill_planner: bool = False) -> dict:
    """Losses, schedules and proposals of a run; after a change, ranks wait until the plan has been made."""
    engine = begun(config)
    adaptation, losses, schedules, predicted = engine.adaptation, [], [], []
    if adaptation is not None:
        report(adaptation, slow_stage, changed)
    for _ in range(STEPS):
        losses.append(float(engine.train_batch()))
        check_order_of_last(engine)
        schedules.append(engine.schedule.rows)
        predicted.append(engine.plan.step_s)
        running = None if adaptation is None else adaptation._replanning
        if running is not None and kill_planner:
            os.kill(running._process.pid, signal.SIGKILL)
        while running is not None and not running.has_ended:
            sleep(0.01)
        dist.barrier()
    peak = peak_bytes(engine.plan.schedules[1], engine.plan.costs)
    proposals = [] if adaptation is None else [(step, found.chosen) for step, found in adaptation.proposals]
    engine.destroy()
    dist.barrier()
    return {
        "losses": losses,
        "schedules": schedules,
        "predicted": predicted,
        "proposals": proposals,
        "peak": peak,
    }


def train_three(config: WeftConfig) -> list[dict]:
    """A run that adapts, one whose planner is killed, and one that does not adapt."""
    runs = [train(config, 0), train(config, 0, kill_planner=True)]
    config.pipeline.adapt = False
    return [*runs, train(config, 0)]


def check_order_of_last(engine) -> None:
    """The slots of the last step are the row that the engine holds, exactly."""
    row = engine.schedule.rows[engine.pipe_rank]
    assert [mark.slot for mark in engine.records[-1].marks] == list(row)


def die_while_planning(config: WeftConfig) -> str:
    """Rank 1 dies while rank 0 plans. Return rank 0's error, after which no process of its is left."""
    engine = begun(config)
    report(engine.adaptation, 1)
    planner = None
    try:
        for _ in range(STEPS):
            engine.train_batch()
            running = engine.adaptation._replanning
            if running is not None:
                planner = running._process
                os.kill(planner.pid, signal.SIGSTOP)  # still planning when the step fails
            if engine.global_steps == CHANGED_AFTER + 3 and engine.global_rank == 1:
                return "left"  # and its process ends
    except RuntimeError as error:
        engine.abandon()
        assert planner is not None and planner.poll() is not None
        with suppress(RuntimeError):
            dist.destroy_process_group()
        return str(error)
    return ""
