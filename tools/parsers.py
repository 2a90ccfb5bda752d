"""Option parsers of commands whose modules import torch, so that ``--help`` does not."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path

from weft.pipeline.costs import LinkCost

INSIDE, BETWEEN = "20,100", "30,50"


def refuse_unused(parser: argparse.ArgumentParser, argv: Sequence[str], options: Iterable[str], reason: str) -> None:
    """Raise ValueError if ``argv`` has one of these options, which the command would not use.

    Args:
        options: destinations of the options in the parser's namespace.
        reason: follows the option's name in the error.
    """
    names = tuple(options)
    given, _ = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(names)))
    for name in names:
        if getattr(given, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: {reason}")


def train() -> argparse.ArgumentParser:
    """Return the parser of `weft train`; settings are left over."""
    parser = argparse.ArgumentParser(
        prog="weft train",
        usage="weft train [--config-file FILE] [recipe=NAME] [key=value ...]",
        description="Train as one rank of a job. `weft launch` starts all of them; to start them by other means, set "
        "the variables that torchrun sets.",
    )
    parser.add_argument("--config-file", metavar="FILE", help="a recipe's YAML file, instead of recipe=NAME")
    # DeepSpeed's launcher appends it; the environment has the same value.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def check() -> argparse.ArgumentParser:
    """Return the parser of `weft check`; settings are left over."""
    return argparse.ArgumentParser(
        prog="weft check",
        usage="weft check model=FOLDER|HUB_NAME | model.arch=TYPE [parallel.tensor=N ...] [key=value ...]",
        description="Compare stages of a small copy of a model with Hugging Face's own forward and backward.",
        allow_abbrev=False,
    )


def profile() -> argparse.ArgumentParser:
    """Return the parser of `weft profile`; settings are left over."""
    parser = argparse.ArgumentParser(
        prog="weft profile",
        usage="weft profile [options] [recipe=NAME] [key=value ...]",
        description="Time one layer of each kind at the shapes of a run, and write the costs for `weft plan` and "
        "pipeline.costs_file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("profile.yaml"), metavar="FILE", help="file to write; default profile.yaml"
    )
    parser.add_argument("--seconds", default="60", help="how long to time layers for; default 60")
    parser.add_argument(
        "--ranks", help="ranks that measure collectives; default one per GPU, 2 on a CPU; 1 skips collectives"
    )
    parser.add_argument(
        "--no-links", dest="links", action="store_false", help="skip the link between ranks, and collectives"
    )
    return parser


def emulate() -> argparse.ArgumentParser:
    """Return the parser of `weft emulate`; settings are left over."""
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
    """Parse LATENCY_US,GBIT_PER_S."""
    try:
        latency, bandwidth = (float(part) for part in text.split(","))
        if not 0 <= latency < inf or not 0 < bandwidth < inf:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give LATENCY_US,GBIT_PER_S, as in {INSIDE}") from None
    return LinkCost(latency_s=latency / 1e6, bandwidth_bps=bandwidth * 1e9)
