"""`weft emulate`: the step of a job of any size, from a few real ranks; all others are emulated where ranks meet."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from weft.comm.emulated.conversation import EmulationError
from weft.conf import load
from weft.conf.files import write_atomic
from weft.conf.hosts import world_size
from weft.engine.emulation.delays import delay_model
from weft.pipeline.costs import LinkCost
from weft.recipes.emulated_job import recipe_job
from weft.tools.emulation.checking import check_rank
from weft.tools.emulation.report import report
from weft.tools.emulation.session import Setting
from weft.tools.emulation.turns import emulate
from weft.tools.emulation.what_if import WhatIf

INSIDE, BETWEEN = "20,100", "30,50"


def main(argv: Sequence[str]) -> int:
    """Run ``[options] [recipe=NAME] [key=value ...]``; returns the exit code.

    Raises:
        ValueError: bad input, or the delay model or a rank does not go on.
    """
    args, overrides = _parser().parse_known_args(argv)
    for option, least in (("most", 1), ("steps", 1), ("at_once", 1), ("per_host", 1)):
        if getattr(args, option) < least:
            said = "at least one rank is real" if option == "most" else f"give at least {least}"
            raise EmulationError(f"--{option.replace('_', '-')} {getattr(args, option)}: {said}")
    delay_model(args.delays)
    real = _ranks(args.real)
    what_if = WhatIf.parse(args.what_if)
    config = load(overrides, recipe_file=args.config_file)
    folder = Path(config.train.output_dir).expanduser() / config.train.name
    job = recipe_job(config, folder, what_if.replicas)
    size = world_size(job.config.cluster)
    what_if.check(size, job.config.pipeline.stages)
    setting = Setting(
        delays=args.delays, per_host=args.per_host, inside=args.inside, between=args.between, what_if=what_if
    )
    if args.at:
        rank, changed = _settings_at(args.at)
        if rank >= size:
            raise EmulationError(f"--at {rank}: there is no such rank; the job has ranks 0 to {size - 1}")
        other = recipe_job(load([*overrides, *changed], recipe_file=args.config_file), folder, what_if.replicas)
        check_rank(job, other, rank, size, setting, ", ".join(changed))
        print(f"rank {rank} with {', '.join(changed)}: all other ranks expect just what it does")
        return 0
    found = emulate(job, size, setting, steps=args.steps, most=args.most, real=real, at_once=args.at_once)
    print(report(found, setting))
    if args.record:
        seconds = {
            str(each.pipeline_rank): dict(turn.actions) for each, turn in zip(found.real, found.turns, strict=True)
        }
        write_atomic(args.record, json.dumps({"compute": seconds}) + "\n")
    if args.json:
        figures = {
            "step_s": found.step_s,
            "rounds_s": found.rounds,
            "real": {turn.rank: {"step_s": turn.step_s, "busy_s": turn.busy_s} for turn in found.turns},
            "twin_s": median(turn.twin_s for turn in found.turns),
        }
        write_atomic(args.json, json.dumps(figures, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft emulate",
        usage="weft emulate [options] recipe=NAME [key=value ...]",
        description="Measure the step time of a large job: run a few of its ranks on this machine, and emulate all "
        "others. Losses are meaningless.",
        allow_abbrev=False,
    )
    parser.add_argument("--config-file", help="a recipe's YAML file, instead of recipe=NAME")
    parser.add_argument(
        "--real", default="auto", help="global ranks to run, such as 0,5,9; default auto: one per class"
    )
    parser.add_argument("--most", type=int, default=16, help="most real ranks that auto chooses (default 16)")
    parser.add_argument("--at-once", type=int, default=1, help="real ranks that run at the same time (default 1)")
    parser.add_argument("--steps", type=int, default=10, help="number of steps to measure (default 10)")
    parser.add_argument(
        "--delays",
        default="simulate",
        help="delay model: simulate, alpha-beta, trace:FILE, FILE.py:CLASS or MODULE:CLASS",
    )
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="change the job, as in slow-rank=3:0.8; see docs/emulation.md",
    )
    parser.add_argument(
        "--at",
        nargs="+",
        default=[],
        metavar=("RANK", "KEY=VALUE"),
        help="find the first mismatch if one rank has other settings",
    )
    parser.add_argument("--per-host", type=int, default=8, help="ranks per host, if there is no hostfile (default 8)")
    link = "latency in microseconds, bandwidth in Gbit/s"
    parser.add_argument("--inside", type=_link, default=INSIDE, help=f"inside a host: {link} (default {INSIDE})")
    parser.add_argument("--between", type=_link, default=BETWEEN, help=f"between hosts of a site (default {BETWEEN})")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write the times of the real ranks, for --delays trace:FILE"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def _link(text: str) -> LinkCost:
    """LATENCY_US,GBIT_PER_S."""
    try:
        latency, bandwidth = (float(part) for part in text.split(","))
        if latency < 0 or bandwidth <= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give LATENCY_US,GBIT_PER_S, as in {INSIDE}") from None
    return LinkCost(latency_s=latency / 1e6, bandwidth_bps=bandwidth * 1e9)


def _ranks(text: str) -> list[int]:
    if text == "auto":
        return []
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise EmulationError(f"--real {text}: give auto, or global ranks such as 0,5,9") from None


def _settings_at(given: Sequence[str]) -> tuple[int, list[str]]:
    rank, *changed = given
    if not rank.isdigit() or not changed or not all("=" in setting for setting in changed):
        raise EmulationError(
            f"--at {' '.join(given)}: give a rank and its settings, as in --at 737 train.precision=fp32"
        )
    return int(rank), changed
