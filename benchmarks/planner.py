"""Plans against all layouts of small clusters, pins and richer clusters, and the time of large searches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time

from benchmarks.results import ROOT, finish, parse, show
from tests.pipeline.planner.changes import compared, is_refuted
from tests.pipeline.planner.judge import judge
from tests.pipeline.planner.random_cases import case
from weft.pipeline.planner.cluster import load_cluster
from weft.pipeline.planner.memo import memo_of
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.search import plan
from weft.tools.planning.command import effort_of
from weft.tools.planning.model import model_work
from weft.tools.tables import table_of

GOAL_S = {"five_sites": 1.0, "twenty_sites": 5.0}
"""Processor seconds of a search, at most."""
BATCH_TOKENS, TOKENS, RUNS = 2**22, 1e12, 3
Part = tuple[list[dict[str, object]], bool]


def main(argv: Sequence[str]) -> int:
    """Run ``[--parts PART ...]`` and return 1 if a claim of a plan is false or a search takes too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks planner", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--clusters", type=int, default=200, help="random clusters for all layouts (brute-force)")
    parser.add_argument("--changed", type=int, default=50, help="random clusters for pins and resources")
    args = parse(parser, argv, parts=PARTS)
    found = {name: PARTS[name](args) for name in args.parts}
    figures = {name: rows for name, (rows, _) in found.items()}
    return finish(args, "planner", figures, met=all(met for _, met in found.values()))


def _searches(_: argparse.Namespace) -> Part:
    """Time searches of the example clusters, each the shortest of `RUNS` runs."""
    rows = list(_searched())
    show(table_of(rows, "Processor seconds of a search, and the gap that it proves"))
    return rows, all(float(str(row["search"]).split()[0]) < GOAL_S[str(row["cluster"])] for row in rows)


def _searched() -> Iterator[dict[str, object]]:
    examples, cache = ROOT / "examples", Path("~/.cache/weft/models.json")
    for name in GOAL_S:
        for model in ("llama-8b", "llama-70b", "llama-405b"):
            cluster = load_cluster(examples / f"{name}.yaml")
            work = model_work(str(examples / "models" / f"{model}.json"), 4096, cache)
            for objective in (Objective.throughput, Objective.cost):
                sequences = BATCH_TOKENS // work.sequence_length
                request = Request(sequences=sequences, objective=objective, effort=effort_of(cluster))
                seconds = []
                for _ in range(RUNS):
                    memo_of.cache_clear()  # each run computes everything
                    started_s = process_time()
                    found = plan(cluster, work, request)
                    seconds.append(process_time() - started_s)
                yield {
                    "cluster": name,
                    "model": model,
                    "objective": objective.value,
                    "shapes": f"{found.shapes:,}",
                    "scheduled": str(found.scheduled),
                    "search": f"{min(seconds):.2f} s",
                    "step": f"{found.best.step_s:.4g} s",
                    "cost of 1e12 tokens": f"{found.best.cost(TOKENS):,.0f}",
                    "proven": f"{found.gap:.1%}",
                }


def _brute_force(args: argparse.Namespace) -> Part:
    """Compare plans with all layouts of random clusters."""
    started_s, verdicts = process_time(), [judge(*case(seed)) for seed in range(args.clusters)]
    gaps = [one.found.gap for one in verdicts if one.found]
    false, ties = ([seed for seed, one in enumerate(verdicts) if getattr(one, name)] for name in ("best", "cheaper"))
    row: dict[str, object] = {
        "clusters": str(len(verdicts)),
        "layouts": f"{sum(one.layouts for one in verdicts):,}",
        "false gaps": str(len(false)),
        "cheaper plans as fast": str(len(ties)),
        "gaps above 0.2 %": str(sum(gap > 0.002 for gap in gaps)),
        "largest gap": f"{max(gaps, default=0.0):.1%}",
        "processor": f"{process_time() - started_s:.0f} s",
    }
    show(table_of([row], "Plans of random clusters against all layouts"))
    show(*(f"refuted: cluster {seed}" for seed in sorted({*false, *ties})))
    return [row], not (false or ties)


def _changes(kind: str, title: str) -> Callable[[argparse.Namespace], Part]:
    """Return the part that compares plans with those of changed requests or clusters."""

    def measure(args: argparse.Namespace) -> Part:
        started_s = process_time()
        found = [(seed, *one) for seed in range(args.changed) for one in compared(kind, *case(seed))]
        refuted = [one for one in found if is_refuted(*one[2:])]
        row: dict[str, object] = {
            "clusters": str(args.changed),
            "plans": f"{len(found):,}",
            "better by more than the gap": str(len(refuted)),
            "better at all": str(sum(is_refuted(ratio, 1.0) for _, _, ratio, _ in found)),
            "largest ratio": f"{max((ratio for _, _, ratio, _ in found), default=1.0):.4f}",
            "processor": f"{process_time() - started_s:.0f} s",
        }
        show(table_of([row], title), *(f"refuted: cluster {seed}, {name}" for seed, name, _, _ in refuted))
        return [row], not refuted

    return measure


PARTS = {
    "searches": _searches,
    "brute-force": _brute_force,
    "pins": _changes("pins", "Plans with a field pinned against those without"),
    "resources": _changes(
        "resources", "Plans against those of clusters with more GPUs, memory or bandwidth, or lower prices"
    ),
}
