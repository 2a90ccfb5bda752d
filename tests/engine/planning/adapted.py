"""Runs whose measured costs are replaced, so that the schedule is planned again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.engine.data.test_loader import Blocks, share
from tests.engine.tiny import VOCAB, begun
from weft.conf.schema import WeftConfig
from weft.engine.engine import WeftEngine
from weft.engine.initialize import initialize
from weft.engine.planning.adaptation import Adaptation
from weft.engine.planning.next_attempt import NextAttempt, read_next_attempt
from weft.engine.planning.plan_file import plan_to_json
from weft.engine.planning.replanning import Restart
from weft.pipeline.memory import peak_bytes
from weft.pipeline.simulation import simulate
from weft.recipes.adapting import _write_next

FAST, SLOW = (0.01, 0.01, 0.01), (0.04, 0.002, 0.002)
ALL_SLOW = (0.02, 0.02, 0.02)
CHANGED_AFTER, STEPS = 7, 14
LAYER_S, FACTOR, SLOW_AFTER, RECOVERED_AFTER = 0.01, 3.0, 4, 9


def report(adaptation: Adaptation, *slow_stages: int, changed: tuple[float, ...] = SLOW) -> None:
    """Make a rank report the same durations in all runs: of some stages others after `CHANGED_AFTER` steps."""

    def seconds() -> list[float]:
        engine = adaptation._engine
        has_changed = engine.global_steps > CHANGED_AFTER
        return [
            part if stage in engine.module.stages else 0.0
            for stage in range(engine.plan.placement.num_stages)
            for part in (changed if has_changed and stage in slow_stages else FAST)
        ]

    adaptation._stage_seconds = seconds


def slow_down(rank: int, *, is_slow: Callable[[], bool] = lambda: True) -> None:
    """Let all engines of this process report equally long layers, and longer ones of a rank after some steps.

    Steps wait until a plan has been made.
    """
    train_batch = WeftEngine.train_batch

    def seconds(adaptation: Adaptation) -> list[float]:
        engine, counts = adaptation._engine, adaptation._engine.plan.split.counts
        slow = engine.global_rank == rank and engine.global_steps > SLOW_AFTER and is_slow()
        each = [LAYER_S * (FACTOR if slow else 1.0) * (stage in engine.module.stages) for stage in range(len(counts))]
        return [layer_s * count for layer_s, count in zip(each, counts, strict=True) for _ in range(3)]

    def waiting(engine: WeftEngine, *args: object) -> object:
        while engine.adaptation._replanning is not None and not engine.adaptation._replanning.has_ended:
            sleep(0.01)
        return train_batch(engine, *args)

    Adaptation._stage_seconds = seconds
    WeftEngine.train_batch = waiting


def train(config: WeftConfig, slow_stage: int, changed: tuple[float, ...] = SLOW, kill_planner: bool = False) -> dict:
    """Losses, schedules and proposals of a run; after a change, ranks wait until the plan has been made."""
    engine = begun(config)
    adaptation, losses, schedules, predicted = engine.adaptation, [], [], []
    published = publish_to(engine)
    if adaptation is not None:
        report(adaptation, slow_stage, changed=changed)
    for _ in range(STEPS):
        losses.append(float(engine.train_batch()))
        check_order_of_last(engine)
        schedules.append(engine.schedule.rows)
        predicted.append(engine.plan.step_s)
        running = None if adaptation is None else adaptation._replanning
        if running is not None and kill_planner:
            os.kill(running._process.pid, signal.SIGKILL)
        wait_for_plan(engine)
    peak = peak_bytes(engine.plan.schedules[1], engine.plan.costs)
    costs = engine.plan.costs if adaptation is None else adaptation.costs()
    compute = simulate(engine.plan.schedules[1], costs).compute[engine.pipe_rank]
    proposals = [] if adaptation is None else [(step, found.chosen) for step, found in adaptation.proposals]
    engine.destroy()
    dist.barrier()
    return {
        "losses": losses,
        "schedules": schedules,
        "predicted": predicted,
        "proposals": proposals,
        "peak": peak,
        "published": published,
        "compute": [(span.start_s, span.end_s) for span in compute],
    }


def publish_to(engine) -> list[list[tuple[float, float]]]:
    """The work that the engine publishes for prefill workers from now on, of each schedule that it changes to."""
    published: list[list[tuple[float, float]]] = []

    def replan(predicted) -> None:
        published.append([(span.start_s, span.end_s) for span in predicted])

    def nothing() -> None:
        pass

    engine.bubbles = SimpleNamespace(replan=replan, busy=nothing, idle=nothing, close=nothing)
    return published


def wait_for_plan(engine) -> None:
    """Wait until a plan that is being made is ready. All ranks call it."""
    running = None if engine.adaptation is None else engine.adaptation._replanning
    while running is not None and not running.has_ended:
        sleep(0.01)
    dist.barrier()


def train_three(config: WeftConfig) -> list[dict]:
    """A run that adapts, one whose planner is killed, and one that does not adapt."""
    runs = [train(config, 0), train(config, 0, kill_planner=True)]
    config.pipeline.adapt = False
    return [*runs, train(config, 0)]


def train_recovering(config: WeftConfig, folder: str) -> list[NextAttempt | None]:
    """Changes of the next checkpoint after each step of a run, whose rank 1 is slow for some steps."""
    engine = begun(config)
    slow_down(1, is_slow=lambda: engine.global_steps <= RECOVERED_AFTER)
    adaptation, found = engine.adaptation, []
    assert adaptation is not None
    adaptation.restart = lambda step: Restart(steps_left=1000)
    if not engine.global_rank:
        adaptation.on_restart = partial(_write_next, config, Path(folder))
    for _ in range(2 * RECOVERED_AFTER):
        engine.train_batch()
        wait_for_plan(engine)
        found.append(read_next_attempt(Path(folder)))
    engine.destroy()
    return found


def train_moved(config: WeftConfig, folder: str) -> list[dict]:
    """A run whose replica 0 becomes slow, and its last steps without adaptation, resumed from a checkpoint."""
    moved = train_dealt(config, folder, saved_at=STEPS - 3)
    config.pipeline.adapt = False
    return [moved, train_dealt(config, folder, resume=True)]


def train_dealt(config: WeftConfig, folder: str, saved_at: int = 0, resume: bool = False) -> dict:
    """Losses, positions in the data and micro-batches of a run, of which a checkpoint is written after a step."""
    engine, *_ = initialize(config=config)
    files: list[str] = []
    loader = share(Blocks([1 + 5 * n % 8 for n in range(500)]), replica=engine.replica, replicas=engine.num_replicas)
    engine.set_dataloader(loader)
    engine.set_batch_fn(_in_vocabulary)
    if engine.adaptation is not None:
        stages = range(engine.plan.placement.num_stages) if engine.replica == 0 else ()
        report(engine.adaptation, *stages, changed=ALL_SLOW)
        engine.adaptation.on_change = lambda replicas: files.append(plan_to_json(engine.plan, replicas))
    if resume:
        _, client = engine.load_checkpoint(folder)
        loader.load_state_dict(client["loader"])
    found: dict = {name: [] for name in ("losses", "consumed", "counts", "numbers", "predicted")}
    while engine.global_steps < STEPS:
        found["losses"].append(float(engine.train_batch()))
        check_order_of_last(engine)
        found["consumed"].append(loader.consumed)
        found["counts"].append(engine.deal.counts)
        found["numbers"].append((engine.schedule.num_microbatches, len(engine.fwd_outputs)))
        found["predicted"].append(engine.plan.step_s)
        if engine.global_steps == saved_at:
            engine.save_checkpoint(folder, client_state={"loader": loader.state_dict()})
        wait_for_plan(engine)
    found |= {"row": engine.schedule.rows[engine.pipe_rank], "rank": engine.global_rank, "files": files}
    found |= {"replica": engine.replica, "holds_loss": engine.holds_loss, "made": []}
    for _, proposal in engine.adaptation.proposals if engine.adaptation is not None else ():
        found["made"].append((proposal.chosen, proposal.counts, proposal.step_s()))
    loader.close()
    engine.destroy()
    dist.barrier()
    return found


def _in_vocabulary(batch: dict) -> dict:
    return {name: torch.where(value < 0, value, value % VOCAB) for name, value in batch.items()}


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
