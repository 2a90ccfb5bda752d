"""Steps of the whole engine with strand pairs interleaved, compared with other schedules and engines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.overlap import cases
from benchmarks.overlap.engines import (
    ENGINES,
    HALVES,
    OURS,
    PLAIN,
    ROUND_ROBIN,
    SharedCase,
    SharedRun,
)
from benchmarks.peers.case import middle_and_spread
from benchmarks.results import finish, parse, show
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

RANKS, DEEP = 4, 64
"""Pipeline ranks, and layers where memory is compared: DHelix's models have 12 to 76."""
GAIN, NEAR, MORE = 1.12, 1e-6, 0.03
"""Throughput over 1F1B that Weft's plans are to reach at least, the least of DHelix's figures 11 to 13; how near
losses of different schedules are to be, relative; and how much more memory is allowed."""
ACTIVATIONS = 2 / 3
"""Share of a rank's memory for activations (DHelix figure 5)."""
SAME = (HALVES, ROUND_ROBIN, OURS)
"""Engines whose losses must be equal bit for bit: one schedule, with pairs interleaved or not."""


@dataclass(frozen=True)
class Found:
    """An engine's steps over all rounds.

    Attributes:
        seconds: median of a step.
        spread: range of the middle half of the steps over the median.
        losses: losses of the first round.
        most_live: maximum number of layers alive on the fullest rank.
        planned_s: step time predicted by the engine, or None if it predicts none.
    """

    seconds: float
    spread: float
    losses: tuple[float, ...]
    most_live: int
    planned_s: float | None


def main(argv: Sequence[str]) -> int:
    """Race engines on layers of Llama-25B on 4 pipeline ranks x tensor 2, with emulated compute and links.

    Returns:
        0 if the goals are met, 1 if not.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks pairs", description=__doc__)
    parser.add_argument("--microbatches", type=int, nargs="+", default=(12,), help="of a step")
    parser.add_argument("--share", type=float, default=0.31, help="of a micro-batch, what collectives take")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a micro-batch on a rank, without overlap")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--factor", type=float, default=1.0, help="overlap effectiveness")
    parser.add_argument("--steps", type=int, default=2, help="measured in a round")
    parser.add_argument("--rounds", type=int, default=1, help="times that each engine runs, alternately")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), help="names of rows")
    args = parse(parser, argv, engines=ENGINES)
    _check(args)
    show(table_of(cases.planned_rows(args.factor), "communication that each order hides, as planned", left=1))
    layer_s = args.seconds * RANKS / args.layers
    traced = cases.OverlapCase("tensor", 2, args.share, args.factor, layers=1, seconds=layer_s)
    ((layer, _),) = traced.stage().runs
    case = SharedCase(layer=layer, table=traced.table, ranks=RANKS, layers=args.layers, steps=args.steps)
    met, figures = [], {}
    for count in args.microbatches:
        given = replace(case, microbatches=count, timeout_s=_timeout_s(args, count))
        found = _race(args.engines, given, args.rounds)
        figures[count] = found
        title = f"{count} micro-batches, {args.layers} layers, {args.share:.0%} communication"
        show(table_of(_rows(found), title, left=1))
        met += [f"{count} micro-batches: {what}" for what in unmet(found)]
    live = _most_live(replace(case, layers=DEEP, microbatches=2 * RANKS, steps=0, timeout_s=300.0))
    more = ACTIVATIONS * (live[OURS] / live[PLAIN] - 1)
    print(
        f"with {DEEP} layers the fullest rank holds the activations of {live[OURS]}, under 1F1B of {live[PLAIN]}: "
        f"{more:+.1%} of its memory"
    )
    if more > MORE:
        met.append(f"{OURS}: {more:.1%} more memory than 1F1B, not {MORE:.0%}")
    print("met" if not met else "NOT met:\n" + "\n".join(met))
    return finish(args, "pairs", {"steps": figures, "live_layers": live}, met=not met)


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.share < 1:
        raise ValueError(f"--share {args.share}: must lie between 0 and 1")
    if args.layers < 1 or args.layers % (2 * RANKS):
        raise ValueError(f"--layers {args.layers}: must be a multiple of {2 * RANKS} virtual stages")
    if bad := [count for count in args.microbatches if count < 2 * RANKS]:
        raise ValueError(f"--microbatches {bad[0]}: the W needs at least {2 * RANKS}")
    if min(args.seconds, args.steps, args.rounds) <= 0:
        raise ValueError("--seconds, --steps and --rounds: must be above 0")


def _timeout_s(args: argparse.Namespace, count: int) -> float:
    return 60.0 + 10 * args.steps * args.seconds * (count + RANKS)


def _race(engines: Sequence[str], case: SharedCase, rounds: int) -> dict[str, Found]:
    """Run each engine ``rounds`` times in new processes, alternating between engines."""
    runs: dict[str, list[list[SharedRun]]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name in engines:
            print(f"{case.microbatches} micro-batches: round {turn + 1} of {rounds}, {name}", file=sys.stderr)
            ranks = case.ranks * case.tensor
            runs[name].append(run_ranks(ranks, ENGINES[name], case, timeout_s=case.timeout_s))
    return {name: _found(turns) for name, turns in runs.items()}


def _most_live(case: SharedCase) -> dict[str, int]:
    """Return, by engine, the maximum number of layers alive on the fullest rank.

    It is measured in a step that takes no time, because orders do not depend on durations.
    """
    ranks = case.ranks * case.tensor
    runs = {name: run_ranks(ranks, ENGINES[name], case, timeout_s=case.timeout_s) for name in (PLAIN, OURS)}
    return {name: max(run.most_live for run in found) for name, found in runs.items()}


def _found(turns: Sequence[Sequence[SharedRun]]) -> Found:
    middle, spread = middle_and_spread([seconds for ranks in turns for seconds in ranks[0].step_s])
    first = turns[0]
    return Found(middle, spread, first[0].losses, max(run.most_live for run in first), first[0].planned_s)


def _rows(found: Mapping[str, Found]) -> list[dict[str, object]]:
    """Return the rows of the table."""
    plain = found.get(PLAIN)
    return [
        {
            "engine": name,
            "ms": f"{1e3 * run.seconds:.0f}",
            "spread": f"{run.spread:.1%}",
            "throughput": f"{plain.seconds / run.seconds:.3f}" if plain else "-",
            "planned ms": f"{1e3 * run.planned_s:.0f}" if run.planned_s else "-",
            "/ planned": f"{run.seconds / run.planned_s:.3f}" if run.planned_s else "-",
            "live layers": run.most_live,
            "loss": f"{run.losses[-1]:.9g}",
        }
        for name, run in found.items()
    ]


def unmet(found: Mapping[str, Found]) -> list[str]:
    """Return the goals that were measured and missed."""
    short = []
    ours, plain = found.get(OURS), found.get(PLAIN)
    if ours is not None and plain is not None and (gain := plain.seconds / ours.seconds) < GAIN:
        short.append(f"{OURS}: {gain:.2f} of 1F1B's throughput, not {GAIN:g}")
    if ours is not None and (faster := [name for name, run in found.items() if run.seconds < ours.seconds]):
        short.append(f"faster than {OURS}: {', '.join(faster)}")
    if len({found[name].losses for name in SAME if name in found}) > 1:
        short.append("losses of one schedule differ with how its pairs run")
    if plain is not None:
        short += [f"losses of {name} are not those of {PLAIN}" for name, run in found.items() if not _near(run, plain)]
    return short


def _near(run: Found, other: Found) -> bool:
    return all(abs(one - two) <= NEAR * abs(two) for one, two in zip(run.losses, other.losses, strict=True))
