"""The problems of MegaScale's section 6.3 on CPU ranks: a slow host, garbage collection, late reductions."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from benchmarks.results import finish, parse, show
from tests.quickstart import TINY_QUICKSTART, train
from tests.tools.watch.fail_slows import trial
from weft.engine.engine import WeftEngine
from weft.engine.execution.compute import Compute
from weft.engine.observability import clock, event_timer
from weft.engine.zero.sharding import Sharding
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of
from weft.tools.watch.explain import Limit, limits
from weft.tools.watch.outliers import outliers, pauses
from weft.tools.watch.record import RunRecord

RANKS, STAGES = 4, 2
WORK_S = 0.03
"""Seconds of a forward, and of a backward."""
HOST, SLOWER = (1, 3), 1.25
"""Ranks of the slow host, which are a pipeline, and the factor of their computations."""
GARBAGE = 400_000
"""Objects in cycles that a collection finds."""
LATE_S = 0.002
"""Delay of a rank's reductions in seconds, per step since the first late one."""
TRIALS = 20
"""Random fail-slows, of which one may be named wrongly."""
EXPECTED = {"host": ("rank", "compute"), "garbage": ("pauses", "compute"), "launch": ("pauses", "REDUCE_GRAD")}
"""The kind of limit and the section that are to be named, by cause."""


def main(argv: Sequence[str]) -> int:
    """Run ``inject CAUSE ...`` and return 0 if the run's views name the cause, and no other rank."""
    args = parse(_parser(), argv)
    if args.cause == "random":
        return _random(args)
    folder = args.output.absolute()
    if (folder / "quickstart").exists():
        raise ValueError(f"--output {args.output}: it has a run, which would be resumed; remove it, or name another")
    folder.mkdir(parents=True, exist_ok=True)
    run_ranks(RANKS, train_with, args.cause, folder, args.steps, HOST, args.slower, timeout_s=args.timeout)
    run = folder / "quickstart"
    found, named = diagnosis(RunRecord(run))
    rows = [{"limit": limit.kind, "gain": f"{limit.gain:.0%}", "text": limit.text} for limit in found]
    show(table_of(rows, f"injected: {args.cause}"), f"weft watch {run}; weft explain {run}")
    return finish(args, "inject", rows, met=is_named(args.cause, named))


def _random(args: argparse.Namespace) -> int:
    """Record runs with the simulator, each with a random fail-slow. Return 0 if at most one is not named rightly."""
    with TemporaryDirectory(prefix="weft-inject-") as folder:
        trials = [trial(Path(folder) / str(seed), seed) for seed in range(TRIALS)]
    rows = [
        {
            "slow": f"{each.kind} {sorted(each.slow)}",
            "by": f"{each.factor - 1:.0%}, {'always' if each.always else 'at times'}",
            "named": "rightly" if each.is_right else str(sorted(each.named)),
        }
        for each in trials
    ]
    show(table_of(rows, f"{sum(each.is_right for each in trials)} of {TRIALS} fail-slows are named rightly"))
    return finish(args, "inject", rows, met=sum(each.is_right for each in trials) >= TRIALS - 1)


def expected(cause: str) -> list[tuple[str, int | None]]:
    """Return the sections and ranks that the views are to name; no rank of pauses, which change ranks."""
    kind, section = EXPECTED[cause]
    return [(section, rank) for rank in HOST] if kind == "rank" else [(section, None)]


def is_named(cause: str, named: Sequence[tuple[str, int | None]]) -> bool:
    """Return True if a cause is named, and no other rank. Other programs of the host may make ranks pause as well."""
    steady = [each for each in expected(cause) if each[1] is not None]
    return set(expected(cause)) <= set(named) and [each for each in named if each[1] is not None] == steady


def diagnosis(record: RunRecord) -> tuple[list[Limit], list[tuple[str, int | None]]]:
    """Return what limits a run, and the sections that are named, with the rank if it is always the same."""
    steady = sorted((each.section, each.rank) for each in outliers(record))
    return limits(record), [*steady, *((each.section, None) for each in pauses(record))]


def train_with(
    cause: str,
    folder: Path,
    steps: int,
    slow: Collection[int] = HOST,
    slower: float = SLOWER,
    is_exact: bool = False,
) -> None:
    """Train on this rank with emulated compute. The second half of the steps has the cause.

    Args:
        slow, slower: ranks of the slow host, and the factor of their computations.
        is_exact: the event timer's clock omits what a loaded host adds to a computation.
    """
    rank, first, step, added_s = int(os.environ["RANK"]), steps // 2, 0, 0.0
    garbage: list[Any] = []

    def late(number: int, every: int) -> bool:
        return step >= first and step % every == number % every

    def lasting(compute: Callable[..., None]) -> Callable[..., None]:
        def work(*arguments: Any) -> None:
            nonlocal added_s
            start = perf_counter()
            compute(*arguments)
            lasted_s = perf_counter() - start  # longer than WORK_S on a loaded host
            factor = slower if cause == "host" and rank in slow and step >= first else 1.0
            work_s = factor * (WORK_S if is_exact else max(WORK_S, lasted_s))
            sleep(max(0.0, work_s - lasted_s))
            added_s += perf_counter() - start - work_s
            if cause == "garbage" and garbage and late(rank, RANKS):
                garbage.clear()
                gc.collect()

        return work

    reduce, batch = Sharding.reduce, WeftEngine.train_batch

    def launch(sharding: Sharding, stage: int) -> None:
        if cause == "launch" and late(rank % (RANKS // STAGES), RANKS // STAGES):
            sleep(LATE_S * (step - first + 1))
        reduce(sharding, stage)

    def counted(engine: WeftEngine, *arguments: Any) -> Any:
        nonlocal step
        step += 1
        if cause == "garbage" and late(rank, RANKS):
            garbage.extend(_cycles(GARBAGE))
        return batch(engine, *arguments)

    if is_exact:
        for module in (clock, event_timer):
            module.perf_counter = lambda: perf_counter() - added_s  # type: ignore[attr-defined]
    gc.disable()
    Compute.forward, Compute.backward = lasting(Compute.forward), lasting(Compute.backward)  # type: ignore[method-assign]
    Sharding.reduce, WeftEngine.train_batch = launch, counted  # type: ignore[method-assign,assignment]
    train(
        [
            *TINY_QUICKSTART,
            f"train.steps={steps}",
            f"pipeline.stages={STAGES}",
            f"cluster.ranks={RANKS}",
            "pipeline.microbatches=4",
        ],
        folder,
    )


def _cycles(count: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    for _ in range(count):
        each: list[Any] = []
        each.append(each)
        found.append(each)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks inject", description=__doc__)
    parser.add_argument(
        "cause",
        choices=[*EXPECTED, "random"],
        help=f"what is injected into the second half of the steps; random: {TRIALS} fail-slows, in simulated runs",
    )
    parser.add_argument("--slower", type=float, default=SLOWER, help="factor of a slow host's computations")
    parser.add_argument("--output", type=Path, default=Path("runs/inject"), help="folder of the run")
    parser.add_argument("--steps", type=int, default=50, help="steps of the run")
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds after which the run is aborted")
    return parser
