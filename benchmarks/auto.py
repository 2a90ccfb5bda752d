"""`auto` compared with every fixed schedule on every placement, on random clusters of 1 to 4 sites."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import mean

from benchmarks.results import finish, parse, show
from tests.pipeline.generators.random_clusters import ROUNDING, Outcome, compare, random_cluster
from weft.pipeline.limits import count
from weft.tools.tables import table_of


def main(argv: Sequence[str]) -> int:
    """Print how often `auto` is faster, equal and slower, and return 1 if it is ever slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks auto", description=__doc__)
    parser.add_argument("--clusters", type=int, default=200, help="number of clusters")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    args = parse(parser, argv)
    count(args.clusters, "--clusters")
    count(args.first, "--first", least=0)
    seeds = range(args.first, args.first + args.clusters)
    outcomes = [compare(random_cluster(seed)) for seed in seeds]
    title = "auto over the best fixed schedule on any placement, on every placement itself, under the same cap"
    show(
        table_of(_rows(outcomes), title),
        "placements that auto took: " + _counts(outcome.auto.name for outcome in outcomes),
        "best fixed schedules: " + _counts(outcome.fixed or "none under the cap" for outcome in outcomes),
    )
    slower = [(seed, o) for seed, o in zip(seeds, outcomes, strict=True) if o.auto.step_s > o.fixed_s * ROUNDING]
    show(*(f"slower: cluster {seed}: {o.auto.step_s:g} s, {o.fixed} {o.fixed_s:g} s" for seed, o in slower))
    held = [(seed, name) for seed, o in zip(seeds, outcomes, strict=True) for name in o.slower]
    show(*(f"slower on its placement: cluster {seed}: {name}" for seed, name in held))
    return finish(args, "auto", outcomes, met=not (slower or held))


def _rows(outcomes: Sequence[Outcome]) -> Iterator[dict[str, object]]:
    for sites in (*sorted({len(o.cluster.sites) for o in outcomes}), 0):
        some = [o for o in outcomes if sites in (0, len(o.cluster.sites))]
        ratios = [o.auto.step_s / o.fixed_s for o in some if o.fixed]
        yield {
            "sites": str(sites or "all"),
            "clusters": str(len(some)),
            "auto faster": str(sum(ratio < 1 / ROUNDING for ratio in ratios)),
            "equal": str(sum(1 / ROUNDING <= ratio <= ROUNDING for ratio in ratios)),
            "slower": str(sum(ratio > ROUNDING for ratio in ratios)),
            "no fixed schedule fits the cap": str(len(some) - len(ratios)),
            "mean ratio": f"{mean(ratios):.3f}" if ratios else "-",
            "best": f"{min(ratios):.3f}" if ratios else "-",
        }


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{name} {times}" for name, times in Counter(names).most_common())
