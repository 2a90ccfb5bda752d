"""`weft doctor`: check the links between sites, a host, the connections between ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from weft.conf.features import FEATURES, require
from weft.tools.parsers import refuse_unused

_CHECKS = {check: f"weft.tools.diagnostics.{check}" for check in ("node", "ring", "cache")} | {
    check: module for feature in FEATURES.values() for check, module in feature.checks.items()
}
_OWNERS = {check: name for name, feature in FEATURES.items() for check in feature.checks}


def main(argv: Sequence[str]) -> int:
    """Run ``weft doctor CHECK ...`` and return the exit code.

    Raises:
        ValueError: the check needs a feature that is not installed, or bad input.
    """
    parser = argparse.ArgumentParser(prog="weft doctor", description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True)
    net = checks.add_parser("net", help="probe the links between sites", description=NET)
    add_net_options(net)
    add_node_options(checks.add_parser("node", help="check this host", description=NODE))
    add_ring_options(checks.add_parser("ring", help="check the connections between ranks", description=RING))
    add_cache_options(checks.add_parser("cache", help="list or clear measurements", description=CACHE))
    args = parser.parse_args(argv)
    if args.check == "net" and args.netbed:
        refuse_unused(net, argv[1:], ("port", "peer", "congestion"), "--netbed probes its own nodes; leave out one")
    if args.check in _OWNERS:
        require(_OWNERS[args.check], f"weft doctor {args.check}")
    code: int = import_module(_CHECKS[args.check]).run(args)  # most import torch
    return code


NET = """
Measures round trip, one connection's rate and the rate of many, in each direction alone and in both
at once, and prints how many connections fill the link. Run it at both sites: at one `weft doctor net
--bind ADDRESS`, and at the other `weft doctor net --bind ADDRESS --peer ADDRESS:PORT` with what the
first one prints. Both need the same WEFT_KEY. With --netbed FILE it probes an emulated WAN instead.
"""
NODE = """
Checks this host: speed of memory and matrix products, products checked bit by bit, the disk of a folder, the clock,
loopback, collectives between its devices, and what its GPUs report. Speeds are held against the data sheet where the
device is known, and otherwise against the best that this host has done before. Exit code 1 if anything failed.
"""
CACHE = "Lists what was measured on this machine and plans go by, with date, load and spread, or removes it."
NODE_FAULTS = (
    "slow-memory",
    "slow-gemm",
    "gemm-bit",
    "slow-disk",
    "full-disk",
    "clock",
    "damaged-loopback",
    "wrong-rank",
    "hung-rank",
)
NODE_CHECKS = ("collectives", "memory", "gemm", "bits", "disk", "space", "clock", "loopback", "gpu", "xid")
"""Names of the checks, in order of execution."""

RING = """
Run by all ranks of a job (`deepspeed --hostfile FILE --module weft.tools.doctor ring`, torchrun, srun), or with
--ranks on this host alone. Each rank exchanges numbers with the next, all pairs that share no rank at once; then all
sum. Rank 0 prints which pair is slower than others of its kind, brings wrong numbers, or does not answer. Exit code 1
if anything failed.
"""
RING_FAULTS = ("slow", "wrong", "hung")


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft doctor node``."""
    parser.add_argument("--folder", type=Path, default=Path("."), help="whose disk is checked; default: this one")
    parser.add_argument("--ranks", type=int, default=0, help="of this host; default: its GPUs, or 2")
    parser.add_argument("--driver", default="", help="whose clock is compared: HOST:PORT, or a Unix socket's name")
    parser.add_argument("--cache", type=Path, help="file of this host's best figures")
    parser.add_argument("--only", nargs="+", choices=NODE_CHECKS, metavar="CHECK", help=f"of {', '.join(NODE_CHECKS)}")
    parser.add_argument("--json", action="store_true", help="the findings as a JSON list")
    parser.add_argument(
        "--inject",
        nargs="+",
        choices=NODE_FAULTS,
        default=[],
        metavar="FAULT",
        help=f"be faulty: {', '.join(NODE_FAULTS)}",
    )


def add_ring_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft doctor ring``."""
    parser.add_argument(
        "--ranks", type=int, default=0, help="start so many ranks on this host; default: be one of a job"
    )
    parser.add_argument("--share", type=float, default=0.3, help="least share of the median of pairs of the same kind")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds after which a rank does not answer")
    parser.add_argument("--json", action="store_true", help="the findings as a JSON list")
    parser.add_argument(
        "--inject", default="", metavar="FAULT=RANK", help=f"be faulty towards the next rank: {', '.join(RING_FAULTS)}"
    )


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft doctor cache``."""
    parser.add_argument("--folder", default="", help="a run's data.cache_dir; default: the usual one")
    parser.add_argument(
        "--clear", nargs="*", metavar="NAME", help="remove values by name, part of a name or file; all if none is given"
    )


def add_net_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `weft doctor net`."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--netbed", type=Path, metavar="FILE", help="a topology of `weft netbed`")
    where.add_argument("--bind", help="this host's IP address on the WAN")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; default: a free one")
    parser.add_argument("--peer", default="", help="ADDRESS:PORT of the other site's doctor")
    parser.add_argument("--most", type=int, default=32, help="the greatest number of connections to try")
    parser.add_argument("--seconds", type=float, default=0.5, help="time of one measurement")
    parser.add_argument("--congestion", default="", help="the kernel's congestion control, such as bbr")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
