"""A rank, link or replica that becomes slow while training: steps before, and during it without and with adaptation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.adapting.disturbance import SPEED
from benchmarks.adapting.jittery import CASES as JITTERY
from benchmarks.adapting.jittery import Jittery, run_jittery
from benchmarks.adapting.lasting import CASES, Adapted, run_lasting
from benchmarks.adapting.steady import NAMES as STEADY
from benchmarks.adapting.steady import Steady, run_steady
from benchmarks.results import finish, parse, show
from weft.comm.wan.library import load
from weft.tools.tables import table_of

GOAL = 0.6
"""Share of the gain on paper that must be measured."""
NAMES = (*CASES, *STEADY, *JITTERY)


def main(argv: Sequence[str]) -> int:
    """Run the cases, and return 1 if one misses its goal."""
    args = parse(_parser(), argv, only=NAMES)
    load()  # compiled here, not while a run is timed
    chosen = args.only or NAMES
    adapted = [run_lasting(name, args) for name in CASES if name in chosen]
    steady = [run_steady(name, args) for name in STEADY if name in chosen]
    jittery = [run_jittery(name, args) for name in JITTERY if name in chosen]
    if adapted:
        show(table_of(map(_adapted_cells, adapted), f"a rank or replica at {SPEED:.0%}, a link at a third of its rate"))
    if steady:
        show(table_of(map(_steady_cells, steady), "no lasting change"))
    if jittery:
        show(table_of(map(_jittery_cells, jittery), "planned with medians and against sampled durations, by turns"))
    met = all(case.won >= GOAL and case.is_in_order for case in adapted)
    met = met and all(case.is_met for case in steady) and all(case.is_met for case in jittery)
    return finish(args, "adapt", [*adapted, *steady, *jittery], met=met)


def _adapted_cells(case: Adapted) -> dict[str, Any]:
    return {
        "case": case.name,
        "before s": f"{case.before_s:.3f}",
        "1F1B s": f"{case.steps_s['1f1b']:.3f}" if "1f1b" in case.steps_s else "over cap",
        "first s": f"{case.steps_s['first']:.3f}",
        "adapted s": f"{case.steps_s['adapted']:.3f}",
        "simulated": " / ".join(f"{seconds:.3f}" for seconds in case.simulated_s.values()),
        "gains": " ".join(f"{gain:.1%}" for gain in case.gains),
        "won": f"{case.won:.0%} of {case.paper:.1%}",
    }


def _steady_cells(case: Steady) -> dict[str, Any]:
    return {
        "case": case.name,
        "steps": case.steps,
        "plans": " ".join(map(str, case.plans)),
        "changes": " ".join(map(str, case.changes)),
        "step over that without adaptation": " ".join(f"{ratio:.3f}" for ratio in case.ratios),
    }


def _jittery_cells(case: Jittery) -> dict[str, Any]:
    return {
        "case": case.name,
        "jitter, measured": " ".join(f"{jitter:.2f}" for jitter in case.jitter),
        "medians s": f"{mean(case.medians_s):.3f}",
        "samples s": f"{mean(case.samples_s):.3f}",
        "gains": " ".join(f"{gain:.1%}" for gain in case.gains),
        "mean gain": f"{mean(case.gains):.1%}",
        "simulated": f"{case.simulated:.1%}",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks adapt", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--layer", type=float, default=25.0, help="a layer's forward in ms, and each of its gradients")
    parser.add_argument("--short", type=float, default=10.0, help="the same without a lasting change")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each schedule, or pairs of runs")
    parser.add_argument("--steps", type=int, default=500, help="undisturbed steps")
    parser.add_argument("--alternating", type=int, default=160, help="steps with an alternating rank")
    parser.add_argument("--latency", type=float, default=25.0, help="one-way delay between sites in ms")
    parser.add_argument("--rate", type=float, default=50.0, help="uplink of a node in Mbit/s")
    parser.add_argument("--search", type=float, default=1.0, help="pipeline.search_seconds")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case is given up")
    return parser
