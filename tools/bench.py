"""`weft bench`: a table from benchmark to the module that runs it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module

BENCHES = {
    "auto": "the auto schedule beside the fixed ones in the same memory, at every size",
    "bubbles": "training and vLLM prefill workers side by side: what prefill gains, and what it costs",
    "clusters": "the auto schedule beside every fixed one on any placement, on random clusters",
    "collectives": "what collectives cost on a topology, and what partitioning them gains",
    "cell": "the WAN uplinks of a DP-cell, shared in time and not",
    "engine": "a step of Weft's engine over its ideal, beside DeepSpeed's and torch's 1F1B",
    "faults": "a training run over three sites, what is done to it, and how long it takes to heal",
    "generation": "how long the auto schedule takes to make, as ranks and micro-batches grow",
    "line": "how much one processor core carries as the line of a netbed",
    "memory": "what a rank holds at each ZeRO stage: predicted, measured, and DeepSpeed's",
    "optimal": "the auto schedule beside the proven optimum of small cases",
    "placements": "straight, fold or a fold in each site, as the WAN gets slower",
    "prefill": "how long it takes to find a bubble and a worker for a prompt",
    "schedules": "every engine and schedule on the same emulated layers",
    "sites": "a step over three sites, by engine, with and without sharing the uplinks in time",
    "wan": "the WAN channel beside iperf3, over distance and connections",
    "zero": "sharded data parallelism over a slow link, beside DeepSpeed and torch",
}


def main(argv: Sequence[str]) -> int:
    """Run ``NAME [options]``, or list the benchmarks; returns the exit code.

    Each is `main(argv) -> int` of the module ``weft.tools.benchmarks.NAME``, and prints a table of
    ratios measured side by side in one run.

    Raises:
        ValueError: there is no such benchmark.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: weft bench NAME ...\n")
        for name, summary in BENCHES.items():
            print(f"  {name:<12} {summary}")
        return 0
    name, *rest = argv
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f"did you mean {near[0]}?" if near else "`weft bench` lists them"
        raise ValueError(f"{name}: there is no such benchmark; {hint}")
    return import_module(f"weft.tools.benchmarks.{name}").main(rest)
