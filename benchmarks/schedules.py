"""Every engine and schedule on the same emulated layers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.race import Result, print_table, race
from benchmarks.peers.table import PEERS
from benchmarks.results import finish, parse

SIZES = ((8, 8), (8, 16), (16, 8), (16, 16))
"""Layers and micro-batches."""
HIDDEN_MIB = (1, 8)
NUMBERS = range(1, len(SIZES) * len(HIDDEN_MIB) + 1)


def main(argv: Sequence[str]) -> int:
    """Layers of 10 ms forward, input gradient and weight gradient on 4 ranks; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks schedules", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest case, one round of three steps")
    parser.add_argument(
        "--cases", nargs="+", metavar="N", type=int, default=list(NUMBERS), help=f"of 1 to {NUMBERS[-1]}"
    )
    parser.add_argument(
        "--engines", nargs="+", metavar="NAME", default=list(PEERS), help=f"which to run, of {', '.join(PEERS)}"
    )
    args = parse(parser, argv, engines=PEERS, cases=NUMBERS)
    cases = [case for number, case in enumerate(_cases(args.quick), start=1) if number in args.cases]
    results = list(race(args.engines, cases, rounds=1 if args.quick else 2))
    print_table(
        results, "a training step: 10 ms forward, input and weight gradient per layer, 4 ranks", _to_best(results)
    )
    return finish(args, "schedules", results)


def _cases(quick: bool) -> list[EngineCase]:
    base = EngineCase(num_steps=3 if quick else 5)
    cases = [
        replace(base, num_layers=layers, num_microbatches=count, work=EmulatedWork(hidden_bytes=mib * 2**20))
        for layers, count in SIZES
        for mib in HIDDEN_MIB
    ]
    return cases[:1] if quick else cases


def _to_best(results: Sequence[Result]) -> Callable[[Result], str]:
    best = {case: min(r.median_s for r in results if r.case == case) for case in {r.case for r in results}}
    return lambda result: f"{result.median_s / best[result.case]:.2f}x best"
