"""Time from the command to the first step, and from the last step to the exit, also of torchrun, Trainer and peft."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median

from benchmarks.results import finish, parse, show
from benchmarks.starts.first_step import PEER, RANKS, WEFT, Run, compare
from weft.tools.tables import table_of

MOST_CPU = 1.1
"""Times the peer's processor time that a run may take."""


def main(argv: Sequence[str]) -> int:
    """Run both sides in turns and return 1 if Weft starts or exits later, or takes more processor time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turns (default 3)")
    args = parse(parser, argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: nothing to compare; give at least 1")
    begun = compare(args.rounds)
    show(table_of(map(_start_row, begun.items()), f"{RANKS} ranks, a tiny model with LoRA, {args.rounds} rounds"))
    show(table_of([_ratio_row(begun)], f"{WEFT} over {PEER}, median of ratios by round"))
    figures = {side: [asdict(run) for run in runs] for side, runs in begun.items()}
    return finish(args, "startup", figures, met=_is_no_slower(begun))


def _start_row(found: tuple[str, Sequence[Run]]) -> dict[str, object]:
    side, runs = found
    names = {
        "first output": "said_s",
        "first step": "first_step_s",
        "last step to exit": "exit_s",
        "processor time": "cpu_s",
    }
    return {"run by": side, **{head: _spread([getattr(run, name) for run in runs]) for head, name in names.items()}}


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"


def _ratios(begun: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Return the ratios of `weft launch` to its peer, by measured quantity."""
    names = ("first_step_s", "exit_s", "cpu_s")
    pairs = list(zip(begun[WEFT], begun[PEER], strict=True))
    return {name: median(getattr(own, name) / getattr(peer, name) for own, peer in pairs) for name in names}


def _ratio_row(begun: Mapping[str, Sequence[Run]]) -> dict[str, object]:
    ratios = _ratios(begun)
    return {
        "first step": f"{ratios['first_step_s']:.2f}",
        "last step to exit": f"{ratios['exit_s']:.2f}",
        "processor time": f"{ratios['cpu_s']:.2f}",
    }


def _is_no_slower(begun: Mapping[str, Sequence[Run]]) -> bool:
    """Return True if first step and exit are not later than the peer's, with at most `MOST_CPU` of its CPU time."""
    ratios = _ratios(begun)
    return ratios["first_step_s"] <= 1.0 and ratios["exit_s"] <= 1.0 and ratios["cpu_s"] <= MOST_CPU
