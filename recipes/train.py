"""Training or fine-tuning of a model: the entry point that the launcher starts on every rank."""

from __future__ import annotations

import gc

_COLLECTS = gc.isenabled()
gc.disable()  # each search for garbage would look through all that is imported so far: a fifth of a rank's start

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from time import sleep

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from weft.conf import load
from weft.conf.features import entry, is_installed
from weft.conf.host.private import make_shared_folder, take_secrets, write_private
from weft.conf.host.processes import end_process, freeze_imports
from weft.conf.host.run_lock import RunLock
from weft.conf.host.terminal import print_error
from weft.conf.hosts import run_folder
from weft.conf.schema import WeftConfig
from weft.conf.trees import to_yaml
from weft.engine.attempt import Attempt
from weft.engine.checkpoint import check_folder
from weft.engine.distributed import SharedError, attempt_number, first_to_fail, from_rank_zero, lost_peer, together
from weft.engine.engine import WeftEngine
from weft.engine.initialize import build_engine
from weft.engine.observability.event_ring import rings_folder
from weft.engine.observability.event_timer import EventTimer
from weft.engine.observability.flight_recorder import RecorderServer
from weft.engine.observability.link_gauge import LinkGauge
from weft.engine.observability.watcher import ERROR_FILE, Phase, Watcher, watcher_of
from weft.engine.planning.joining import join_job
from weft.engine.planning.plan_file import plan_to_json
from weft.engine.stop_signals import Stopped, StopSignals
from weft.engine.zero import NonFiniteError, ReplicasDiffer
from weft.recipes.adapting import clear_folder, write_changes
from weft.recipes.finish import check_finish, finish, print_once
from weft.recipes.history import Evaluations
from weft.recipes.objectives import objective_of, open_scores
from weft.recipes.preparation import SELF_CHECK, checked, inputs_of, prepare
from weft.recipes.progress import Progress
from weft.recipes.run import TrainingRun
from weft.recipes.shown import warn_once
from weft.tools import parsers
from weft.tools.preflight import check_resume
from weft.tools.processes import end_with_launcher

if _COLLECTS:
    freeze_imports()
    gc.enable()

REPORT_TIMEOUT_S = 5.0
"""Seconds that a rank waits for the first rank of its host to report an error that both have."""
COLLECTOR_S = 15.0
"""Seconds that a finished run waits for the last events to be written."""


def main(argv: Sequence[str], attempt: Attempt | None = None) -> int:
    """Run ``[--config-file FILE] [recipe=NAME] [key=value ...]`` on this rank. Return the exit code.

    Args:
        attempt: see `train`.
    """
    attempt = attempt or Attempt()
    known, overrides = parsers.train().parse_known_args(argv)
    settings = overrides, known.config_file
    config = deepcopy(
        attempt.kept.get("configuration", settings, lambda: load(overrides, recipe_file=known.config_file))
    )
    attempt.set_up.done("configuration")
    if config.dry_run:
        from weft.tools.dry_run import show

        if os.environ.get("RANK", "0") == "0":
            show(config)
        return 0
    signals = _take_signals(config)
    if signals is not None:
        attempt.callback(signals.close)
    watcher = watcher_of(os.environ)  # from here on an agent sends signals
    attempt.callback(watcher.close)
    code = _exit_code(config, watcher, attempt, signals)
    watcher.close()
    return code


def _take_signals(config: WeftConfig) -> StopSignals | None:
    """Install the handler of stop signals. Return None without ``checkpoint.on_signal``, which leaves signals
    unhandled.

    During the set-up, a signal ends this process. With memory checkpoints of a supervised run it does not, because they
    may have more steps than storage.
    """
    if not config.checkpoint.on_signal:
        return None
    signals = StopSignals(config.checkpoint.signal_deadline_s).open()
    if config.checkpoint.memory_every and entry("supervision").has_memory(os.environ):
        signals.defer()  # memory checkpoints may hold more steps than storage
    return signals


def _exit_code(config: WeftConfig, watcher: Watcher, attempt: Attempt, signals: StopSignals | None) -> int:
    """Train, and return 0 at the end of training, or another code if a signal has ended it."""
    try:
        train(config, watcher, attempt, signals)
    except Stopped as stopped:
        return int(stopped.code or 1)
    except SystemExit as end:
        if end.code:
            raise
        raise RuntimeError("sys.exit(0) was called before training was done") from end
    return 0


def train(
    config: WeftConfig,
    watcher: Watcher | None = None,
    attempt: Attempt | None = None,
    signals: StopSignals | None = None,
) -> WeftEngine:
    """Run the training that ``config`` describes on this rank until its end, and return the engine. Collective call.

    Args:
        watcher: publishes progress to the supervisor. None publishes nothing.
        attempt: receives callbacks that release this rank's resources without collective calls, if an error
            may end the attempt but not the process.
        signals: the installed handler of stop signals. None leaves signals unhandled.

    Raises:
        ValueError: the input is invalid. The message is the same on every rank.
        Stopped: a signal has ended training early (``checkpoint.on_signal``). Raised on every rank.
    """
    watcher, attempt = watcher or Watcher(), attempt or Attempt()
    watcher.enter(Phase.setup)
    config, device = join_job(config)
    attempt.set_up.done("join")
    folder = run_folder(config)
    release, settings = _lock_folder(config, folder, attempt), to_yaml(config)
    config, tokenizer, loader, evaluation = prepare(config, folder, attempt)
    for each in (loader, evaluation):
        attempt.callback(each.close) if each is not None else None
    unchecked = replace(config, model=replace(config.model, self_check=False))
    engine = build_engine(unchecked, device, objective=objective_of(config), attempt=attempt)
    attempt.callback(engine.abandon)
    attempt.interrupt = engine.interrupt
    engine.origin = replace(engine.origin, inputs=from_rank_zero(lambda: inputs_of(config, tokenizer)))
    engine.attach_watcher(watcher)
    engine.stop_signals = signals
    _check_outputs(config, engine, tokenizer, folder)
    engine.set_dataloader(loader)
    open_scores(config, engine, loader)
    if config.checkpoint.memory_every and (problem := entry("supervision").open_memory(config.checkpoint, engine)):
        print_once(problem)

    run = TrainingRun(config, engine, loader, evaluation, folder, Evaluations())
    start = run.resume()
    _record(settings, config, engine, folder)
    collector = _time_events(config, engine, watcher, folder)
    attempt.set_up.done("resume")
    write_changes(config, engine, folder, attempt.set_up.seconds)
    if signals is not None:
        signals.defer()
    attempt.where = run.where
    with Progress(config, engine, folder, loader, start) as progress:
        run.train(start, progress)
        progress.end()
        if engine.must_stop:
            run.stop()
        attempt.where = None
        watcher.enter(Phase.finishing)
        loader.close()
        run.end()  # with logs open, whose lines may wait for space as the checkpoint does

    if signals is not None:
        signals.close()  # what follows can be repeated from the checkpoint
    if config.checkpoint.load_best_model_at_end:
        run.load_best()
    finish(config, engine, tokenizer, folder)
    watcher.stop_timing(finished=True)
    if collector is not None:
        with suppress(subprocess.TimeoutExpired):
            collector.wait(COLLECTOR_S)
    release()
    return engine


def _time_events(
    config: WeftConfig, engine: WeftEngine, watcher: Watcher, folder: Path
) -> subprocess.Popen[bytes] | None:
    """Time this rank's events. Return the host's collector, if this is the host's first rank and starts it."""
    if not config.logging.events or not is_installed("watch"):
        return None
    longest = max(map(len, engine.plan.schedule(engine.line).rows))
    try:
        watcher.timer = EventTimer.open(folder, engine.global_rank, longest, engine.device, watcher.waits)
        watcher.recorder = RecorderServer(rings_folder(folder), engine.global_rank)
        engine.time_events()
        if engine.wan is not None and engine.wan.endpoint is not None:
            watcher.gauge = LinkGauge(rings_folder(folder), engine.global_rank, engine.wan.endpoint)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        started: subprocess.Popen[bytes] = entry("watch").collect(config, folder, first_host=engine.global_rank == 0)
        return started
    except (OSError, ValueError) as error:  # training goes on without
        print(f"weft train: events of rank {engine.global_rank} are not recorded: {error}", file=sys.stderr)
        return None


def _lock_folder(config: WeftConfig, folder: Path, attempt: Attempt) -> Callable[[], None]:
    """Lock the run's folder, and return a function that unlocks it. Collective call.

    Raises:
        ValueError: another run writes there, or the run cannot resume there. Raised on every rank.
    """

    def lock() -> RunLock:
        if attempt_number() <= 1:
            check_resume(config)
        if config.train.shared:
            make_shared_folder(folder)
        return RunLock(folder)

    taken = together(lambda: lock() if dist.get_rank() == 0 else None)
    attempt.set_up.done("lock")
    if taken is None:
        return lambda: None
    attempt.callback(taken.release)
    return taken.release


def _check_outputs(config: WeftConfig, engine: WeftEngine, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Check that checkpoints and exports can be written. Collective call.

    Raises:
        ValueError: they cannot. Raised on every rank.
    """
    check_folder(engine, folder / "checkpoints", keep=config.checkpoint.keep + config.checkpoint.load_best_model_at_end)
    check_finish(config, engine, tokenizer, folder)
    engine.set_up.done("folder")


def _record(settings: str, config: WeftConfig, engine: WeftEngine, folder: Path) -> None:
    """Write given settings, plan and passed self-check of a run that is not refused. Collective call.

    Raises:
        ValueError: they cannot be written. Raised on every rank.
    """

    def write() -> None:
        write_private(folder / "config.yaml", settings)
        clear_folder(folder)
        write_private(folder / "plan.json", plan_to_json(engine.plan))
        if config.model.self_check:
            write_private(folder / SELF_CHECK, checked(config))
        print_once(f"plan: {folder / 'plan.json'} ({engine.plan.summary()})")

    together(lambda: write() if engine.global_rank == 0 else None)


def reports_error(error: ValueError) -> bool:
    """True if this rank must report an input error, so that it is printed once.

    Rank 0 reports an error that all ranks share. Before the rendezvous every rank has the same error, and the first
    rank of each host reports it. The other ranks wait for that, because the launcher ends all ranks once one has ended.
    A later error on a single rank is reported by that rank.
    """
    if isinstance(error, SharedError):
        return dist.get_rank() == 0
    if dist.is_initialized() or os.environ.get("LOCAL_RANK", "0") == "0":
        return True
    sleep(REPORT_TIMEOUT_S)
    return False


def run(argv: Sequence[str]) -> int:
    """Run `main` as a process, once or for each attempt of a supervised run, and return the exit code.

    Errors are printed once per job.
    """
    end_with_launcher(os.environ)
    is_supervised = ERROR_FILE in os.environ
    if not is_supervised:  # else an agent leaves out what its ranks repeat
        warn_once(sys.stderr)
    take_secrets(os.environ)
    try:
        return entry("supervision").run_attempts(argv, main) if is_supervised else main(argv)
    except ValueError as error:
        if reports_error(error):
            print_error("weft train", error)
        return 2
    except (NonFiniteError, ReplicasDiffer) as error:
        if dist.get_rank() == 0:
            print(f"\nweft train: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        # A failed rank or link ends every rank; the first to notice reports it.
        first, lost = first_to_fail(), lost_peer(error)
        if first and lost is None:
            raise
        if first and not is_supervised:  # else an agent names the rank that has gone
            print(f"\nweft train: {lost}", file=sys.stderr)  # not behind the progress bar
        return 1


if __name__ == "__main__":
    end_process(run(sys.argv[1:]))
