"""Files of a run that adapts: the plan that it runs, and what its next checkpoint changes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.conf.host.private import write_private
from weft.conf.schema import Recompute, WeftConfig
from weft.engine.distributed import is_supervised
from weft.engine.engine import WeftEngine
from weft.engine.planning.next_attempt import FILE, NextAttempt
from weft.engine.planning.plan_file import ReplicaPlans, plan_to_json
from weft.engine.planning.replanning import Restart
from weft.pipeline.costs import CostModel
from weft.pipeline.profile import costs_to_yaml


def clear_folder(folder: Path) -> None:
    """Remove the files of earlier attempts, whose steps may run again."""
    for earlier in (*folder.glob("plan-until-*.json"), folder / FILE):
        earlier.unlink(missing_ok=True)


def write_changes(config: WeftConfig, engine: WeftEngine, folder: Path, set_up_s: float) -> None:
    """Let rank 0 of a run that adapts write its changes to the run's folder.

    Args:
        set_up_s: seconds of the attempt's set-up, which the next one has too.
    """
    adaptation = engine.adaptation
    if adaptation is None or engine.global_rank:
        return
    adaptation.on_change = partial(_rewrite_plan, engine, folder)
    if is_supervised(config):
        adaptation.restart = partial(_restart, config, set_up_s)
        adaptation.on_restart = partial(_write_next, config, folder)


def _rewrite_plan(engine: WeftEngine, folder: Path, replicas: ReplicaPlans) -> None:
    try:
        shutil.copy(folder / "plan.json", folder / f"plan-until-{replicas.step}.json")
        write_private(folder / "plan.json", plan_to_json(engine.plan, replicas))
    except OSError as error:  # training goes on with the new plan
        print(f"adapt: {folder / 'plan.json'} still has the previous plan: {error.strerror}", flush=True)


def _restart(config: WeftConfig, set_up_s: float, step: int) -> Restart:
    """Return the price of a restart from the next checkpoint after ``step``."""
    every = config.checkpoint.every
    if not every:
        return Restart(obstacle="checkpoint.every=0")
    left = config.train.steps - (step // every + 1) * every
    return Restart(seconds=set_up_s, steps_left=left, obstacle="" if left > 0 else "no checkpoint is left")


def _write_next(config: WeftConfig, folder: Path, following: NextAttempt, moved_costs: CostModel | None) -> None:
    """Write what the next checkpoint changes, instead of what an earlier plan has written."""
    try:
        (folder / FILE).unlink(missing_ok=True)
        if following.arguments and moved_costs is not None and config.pipeline.recompute is not Recompute.auto:
            costs = folder.absolute() / f"costs-after-{following.after_step}.yaml"
            write_private(costs, costs_to_yaml(moved_costs))
            following = replace(following, arguments=(*following.arguments, f"pipeline.costs_file={costs}"))
        if following.arguments or following.slow_ranks:
            following.write(folder)
    except OSError as error:  # training goes on without a restart
        print(f"adapt: {folder}: the next checkpoint changes nothing: {error.strerror}", flush=True)
