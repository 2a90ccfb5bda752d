"""Strand pairs of two ranks that share their layers on one GPU: a step with them, relative to the same step without."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from statistics import median
from typing import Any

import torch

from benchmarks.memory import VOCABULARY, random_batches
from benchmarks.peers.on_one_gpu import TWO_SITES, run_on_one_gpu
from benchmarks.results import finish, parse, show
from weft.conf import load
from weft.pipeline.action import Action, Op, Slot
from weft.pipeline.schedule import Schedule
from weft.tools.tables import table_of

RANKS, MICROBATCHES = 2, 4
LAYOUT = (
    f"cluster.ranks={RANKS}",
    f"parallel.tensor={RANKS}",
    "pipeline.stages=1",
    "pipeline.placement=straight",
    "pipeline.pairs=always",
    "optimizer.lr=1e-30",  # so that all steps compute the same
)
CLOSE = 1e-3
"""Largest relative difference of losses and gradient norms: in bf16 the order of a GPU's sums may change."""
TIMEOUT_S = 600.0


def main(argv: Sequence[str]) -> int:
    """Time steps by turns, on two ranks. Return 1 if a loss or a gradient norm differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks strands", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="steps of each kind")
    parser.add_argument("--shape", nargs="*", default=(), help="settings of the model, besides the quickstart's")
    args = parse(parser, argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds={args.rounds}: give a number above 0")
    if not torch.cuda.is_available():
        raise ValueError("no GPU: this benchmark runs two ranks on one; `pytest tests/engine/strands` runs on CPUs")
    found = run_on_one_gpu(RANKS, compare, args.rounds, list(args.shape), timeout_s=TIMEOUT_S)[0]
    ratios = [pair / apart for pair, apart in zip(found["pairs"], found["apart"], strict=True)]
    spread = max(abs(value / found["values"][0][i] - 1) for values in found["values"] for i, value in enumerate(values))
    rows = [
        {"forward of one micro-batch and backward of another": name, "step, s": f"{median(found[kind]):.4f}"}
        for kind, name in (("apart", "one after the other"), ("pairs", "as a strand pair"))
    ]
    ratio = f"strand pairs / apart: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    met = spread < CLOSE
    equal = f"losses and gradient norms of all steps are equal within {spread:.1e} (allowed: {CLOSE:g})"
    table = table_of(rows, f"{RANKS} ranks on one GPU, tensor parallelism through host memory")
    show(table, ratio, equal)
    return finish(args, "strands", found | {"ratios": ratios}, met=met)


def compare(rounds: int, shape: Sequence[str]) -> dict[str, Any]:
    """Return the seconds of steps with and without pairs, and loss and gradient norm of each. A collective call."""
    from weft.engine.initialize import init_distributed, initialize

    init_distributed(load([*TWO_SITES, f"cluster.ranks={RANKS}", f"pipeline.stages={RANKS}"]))
    config = load(["recipe=quickstart", *shape, *LAYOUT, f"pipeline.microbatches={MICROBATCHES}"])
    config.model.self_check = False
    config.model.overrides.setdefault("vocab_size", VOCABULARY)
    engine, *_ = initialize(config=config)
    engine.set_dataiterator(repeat(next(random_batches(config))))
    found: dict[str, Any] = {"apart": [], "pairs": [], "values": []}
    for number in range(rounds + 1):
        for kind in ("apart", "pairs"):
            engine.run_schedules({1: of_one_stage(engine.schedules.usual, pairs=kind == "pairs")})
            begin = time.perf_counter()
            loss = float(engine.train_batch())
            seconds = time.perf_counter() - begin
            found["values"].append((loss, float(engine.get_global_grad_norm())))
            if number:  # the first of a kind allocates
                found[kind].append(seconds)
    engine.destroy()
    return found


def of_one_stage(usual: Schedule, *, pairs: bool) -> Schedule:
    """Return a step whose rank starts each forward before the last backward, as a pair or in a slot of its own."""
    forward, backward = ([Action(op, 0, number) for number in range(usual.num_microbatches)] for op in (Op.F, Op.B))
    rest = (slot for slot in usual.rows[0] if slot[0].op not in (Op.F, Op.I, Op.B, Op.W))
    steady: list[Slot] = list(zip(forward[1:], backward, strict=False))
    if not pairs:
        steady = [(action,) for slot in steady for action in slot]
    return replace(usual, name="pairs" if pairs else "apart", rows=(((forward[0],), *steady, (backward[-1],), *rest),))
