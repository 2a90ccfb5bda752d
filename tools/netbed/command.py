"""The `weft netbed` command: build a bed, run programs in it, break its lines, take it down."""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

from weft.comm.key import VARIABLE
from weft.conf import load as load_config
from weft.conf.host.run_lock import RunLock
from weft.conf.hosts import run_folder
from weft.conf.sites import num_routes
from weft.conf.sources import pass_credentials
from weft.tools.launch import environment, write_config
from weft.tools.netbed.bed import NetBed, beds, missing
from weft.tools.netbed.topology import Topology, load
from weft.tools.preflight import preflight
from weft.tools.tables import show, table_of

_PORT = 29500  # each bed has a network of its own
_GRACE_S = 15.0


def launch(overrides: Sequence[str], *, window_kb: float) -> int:
    """Build the bed, start the ranks in its nodes, wait for them and return the first exit code that is not 0.

    Raises:
        ValueError: bad input, found before any process starts.
    """
    config = load_config(overrides)
    cluster = config.cluster
    if len(cluster.sites) < 2:
        raise ValueError("cluster.sites: a bed has at least two; choose cluster=three_sites, or list your own")
    if cluster.hostfile:
        raise ValueError(f"cluster.hostfile={cluster.hostfile}: the ranks run in the bed; leave it out")
    preflight(config, leave_out={"port"})
    replicas = cluster.ranks // config.pipeline.stages // num_routes(cluster)
    topology = Topology.of_cluster(cluster, name=f"run{os.getpid()}", replicas=replicas, window_kb=window_kb)
    with NetBed.up(topology) as bed:
        config = replace(config, cluster=replace(cluster, master_addr=bed.address(bed.nodes[0]), master_port=_PORT))
        folder = run_folder(config)
        RunLock.check(folder)
        pass_credentials(config.data, os.environ)
        file = write_config(config, folder / "config.yaml")
        command = [sys.executable, "-m", "weft.recipes.train", "--config-file", str(file)]
        shared = {VARIABLE: secrets.token_hex(32), **environment(os.environ)} | {
            "WORLD_SIZE": str(cluster.ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": config.cluster.master_addr,
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": "lan0",
        }
        return _wait(
            [bed.popen(node, command, env={**shared, "RANK": str(rank)}) for rank, node in enumerate(bed.nodes)],
            patience_s=config.comm.deadline_s + _GRACE_S,
        )


def _wait(ranks: Sequence[subprocess.Popen], *, patience_s: float) -> int:
    """Wait for all ranks, at most ``patience_s`` seconds after the first failure; return the exit code."""
    code, limit = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and monotonic() < limit:
        failed = next((rank.returncode for rank in ranks if rank.returncode), 0)
        if failed and not code:
            code, limit = failed, monotonic() + patience_s
        sleep(0.1)
    return code or next((rank.returncode for rank in ranks if rank.returncode), 0)


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
    from weft.tools.netbed.command import launch  # loads torch, which a bed does without

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
