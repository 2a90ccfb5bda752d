"""`weft bench line`: the bandwidth that a netbed's line carries with one processor core."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep

from weft.tools.benchmarks.results import parse, write_json
from weft.tools.netbed import Link, NetBed, Node, Topology


def main(argv: Sequence[str]) -> int:
    """Run ``weft bench line ...``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="weft bench line", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time")
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of the largest packet")
    parser.add_argument("--connections", type=int, default=4, help="iperf3's connections")
    args = parse(parser, argv)
    if shutil.which("iperf3") is None:
        raise ValueError("bench line: iperf3 is not installed (package iperf3)")
    with NetBed.up(_topology(args.mtu)) as bed:
        server = bed.popen("b", ["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
        sleep(0.3)
        cpu_s = _cpu_s(bed)
        command = ["iperf3", "-c", bed.address("b"), "-P", str(args.connections), "-t", f"{args.seconds:g}", "-J"]
        done = bed.run("a", command, capture_output=True, text=True, timeout=args.seconds + 60)
        cpu_s = _cpu_s(bed) - cpu_s
        status = bed.status()
        server.kill()
        server.wait()
    received = json.loads(done.stdout)["end"]["sum_received"]
    carried_bits = sum(node.sent_bytes for node in status.nodes) * 8
    figures = {
        "end_to_end_bps": received["bits_per_second"],
        "line_bps_per_core": carried_bits / cpu_s,
        "late_ms": status.lag_ms,
    }
    print(f"{figures['end_to_end_bps'] / 1e9:.2f} Gbit/s end to end at mtu {args.mtu}, on {os.cpu_count()} cores")
    print(
        f"{figures['line_bps_per_core'] / 1e9:.2f} Gbit/s per core of the line; "
        f"a packet was late by {status.lag_ms:.1f} ms"
    )
    write_json(args, "line", figures)
    return 0


def _topology(mtu: int) -> Topology:
    nodes = tuple(Node(name=name, site=site, uplink_mbps=100_000) for name, site in (("a", "east"), ("b", "west")))
    return Topology(
        name=f"line{os.getpid()}", nodes=nodes, links=(Link(sites=("east", "west"), latency_ms=5),), mtu=mtu
    )


def _cpu_s(bed: NetBed) -> float:
    """CPU seconds that the bed's line has used so far."""
    ticks = Path(f"/proc/{bed.status().pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
