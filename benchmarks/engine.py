"""A step of Weft's engine over its simulation, beside DeepSpeed's and torch's 1F1B."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.race import print_table, race
from benchmarks.results import parse, write_json

GOAL = 1.10
"""What a step of Weft's engine may take, over the simulation of the same schedule."""
WORK = EmulatedWork(forward_s=0.01, input_s=0.01, weight_s=0.01, hidden_bytes=8 * 2**20)
ENGINES = ("weft-1f1b", "weft-auto", "deepspeed-1f1b", "torch-1f1b")
"""The one that the goal is for comes first."""


def main(argv: Sequence[str]) -> int:
    """Layers that sleep 10 ms forward and 20 ms backward, 4 ranks, 8 layers, 8 micro-batches, 8 MiB.

    Returns:
        0 if Weft's 1F1B is within the goal, 1 if not.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of three steps")
    args = parse(parser, argv)
    case = EngineCase(work=WORK, num_steps=3 if args.quick else 8)
    results = list(race(ENGINES, [case], rounds=1 if args.quick else 3))
    print_table(results, "a training step: 10 ms forward, 20 ms backward per layer, 4 ranks")
    ratio = results[0].over_simulated
    write_json(args, "engine", results, met=ratio <= GOAL)
    verdict = "met" if ratio <= GOAL else "MISSED"
    print(f"Weft's 1F1B took {ratio:.3f} of its simulation: the goal of {GOAL:.2f} is {verdict}")
    return 0 if ratio <= GOAL else 1
