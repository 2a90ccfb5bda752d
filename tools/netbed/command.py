"""The `weft netbed` command: build a bed, run programs in it, break its lines, take it down."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from weft.tools.netbed.bed import NetBed, beds, missing
from weft.tools.netbed.topology import load
from weft.tools.tables import show, table_of

_EXAMPLE = """\
FILE is YAML:
  name: atlas
  sites: {east: [e0, e1], west: 2}     # node names, or how many
  uplink_mbps: 500                     # of every node, unless
  uplinks: {e1: 100}                   # it is named here
  window_kb: 400                       # receive buffer of a connection; 0 leaves the kernel's
  links: [{sites: [east, west], latency_ms: 20, jitter_ms: 1}]

It needs root, /dev/net/tun, ip (iproute2), nsenter (util-linux) and a C compiler.
"""


def main(argv: list[str]) -> int:
    """Run ``weft netbed ...`` and return the exit code."""
    args = _parser().parse_args(argv)
    if lack := missing():
        raise ValueError(lack)
    return _COMMANDS[args.command](args) or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft netbed",
        description="A WAN in a box: namespaces as nodes, real TCP, a line with rate and delay between sites.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bed", default="", help="name of the bed, where several are up")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="build the bed of a topology file").add_argument("file", type=Path)
    execute = commands.add_parser("exec", help="run a program in a node")
    execute.add_argument("node")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD")
    commands.add_parser("status", help="nodes, counters and faults")
    commands.add_parser("heal", help="end all faults")
    run = commands.add_parser("launch", help="train on the bed of the run's cluster, a node per rank, until it ends")
    run.add_argument("--window", type=float, default=0.0, metavar="KB", help="receive buffer of a connection")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="as of `weft launch`")
    commands.add_parser("down", help="end every process in the bed, and the bed")
    faults = commands.add_parser("fault", help="break a line").add_subparsers(dest="kind", required=True)
    for kind, (_, option, meaning) in _FAULTS.items():
        fault = faults.add_parser(kind, help=meaning)
        fault.add_argument("a", help="node or site")
        fault.add_argument("b", nargs="?", default="", help="node or site; default: all others")
        fault.add_argument("--for", dest="for_s", type=float, default=5.0, metavar="SECONDS", help="default: 5")
        if option:
            fault.add_argument(f"--{option}", type=float, required=True, dest="value")
    return parser


def _up(args: argparse.Namespace) -> None:
    topology = load(args.file)
    bed = NetBed.up(topology)
    bed.detach()
    for name in bed.nodes:
        print(f"{name:<12} {bed.address(name)}")
    print(f"bed {bed.name} is up; `weft netbed down` ends it")


def _exec(args: argparse.Namespace) -> int:
    if not args.argv:
        raise ValueError("exec: give a command, as in `weft netbed exec e0 iperf3 -s`")
    return _bed(args).run(args.node, args.argv).returncode


def _launch(args: argparse.Namespace) -> int:
    from weft.tools.netbed.launch import launch  # loads torch, which a bed does without

    return launch(args.overrides, window_kb=args.window)


def _status(args: argparse.Namespace) -> None:
    if not args.bed and not beds():
        print("no bed is up")
        return
    bed = _bed(args)
    status = bed.status()
    print(f"bed {bed.name}, process {status.pid}: {status.in_flight} packets in flight, lag {status.lag_ms:.2f} ms")
    rows = (
        {
            "node": node.name,
            "address": node.address,
            "uplink Mbit/s": f"{node.uplink_mbps:g}",
            "sent MB": f"{node.sent_bytes / 1e6:.1f}",
            "packets": node.sent_packets,
            "dropped by queue": node.queue_drops,
            "dropped by faults": node.fault_drops,
        }
        for node in status.nodes
    )
    show(table_of(rows, left=2), *(f"fault: {fault}" for fault in status.faults))


def _bed(args: argparse.Namespace) -> NetBed:
    """Return the bed with the name in the arguments, or the only one without a name."""
    up = beds()
    if args.bed:
        return NetBed(args.bed)
    if len(up) != 1:
        raise ValueError(f"--bed: choose one of {', '.join(up)}" if up else "no bed is up; `weft netbed up FILE`")
    return NetBed(up[0])


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "up": _up,
    "exec": _exec,
    "launch": _launch,
    "status": _status,
    "fault": lambda args: _FAULTS[args.kind][0](_bed(args), args),
    "heal": lambda args: _bed(args).heal(),
    "down": lambda args: _bed(args).down(),
}

# kind: effect, option, meaning of the option
_FAULTS: dict[str, tuple[Callable[[NetBed, argparse.Namespace], None], str, str]] = {
    "cut": (lambda bed, a: bed.cut(a.a, a.b, for_s=a.for_s), "", "drop everything"),
    "flap": (lambda bed, a: bed.flap(a.a, a.b, every_s=a.value, for_s=a.for_s), "every", "cut and heal alternately"),
    "slow": (lambda bed, a: bed.slow(a.a, a.b, by=a.value, for_s=a.for_s), "by", "divide the rate"),
    "drop": (lambda bed, a: bed.drop(a.a, a.b, share=a.value, for_s=a.for_s), "share", "lose a share of packets"),
    "flip": (
        lambda bed, a: bed.flip(a.a, a.b, packets=int(a.value), for_s=a.for_s),
        "packets",
        "flip a byte in so many TCP payloads",
    ),
}
