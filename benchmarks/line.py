"""The bandwidth that a netbed's line carries with one processor core."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import sleep
from typing import Any

import psutil

from benchmarks.results import finish, parse
from weft.tools.netbed import NetBed, Topology


def main(argv: Sequence[str]) -> int:
    """Run ``line ...``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks line", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time")
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of the largest packet")
    parser.add_argument("--connections", type=int, default=4, help="iperf3's connections")
    args = parse(parser, argv)
    require_iperf3()
    with NetBed.up(Topology.even((1, 1), uplink_mbps=100_000, latency_ms=5, mtu=args.mtu)) as bed:
        with iperf3_server(bed):
            cpu_s = _cpu_s(bed)
            received = iperf3(bed, args.connections, args.seconds)["sum_received"]
            cpu_s = _cpu_s(bed) - cpu_s
        status = bed.status()
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
    return finish(args, "line", figures)


def require_iperf3() -> None:
    """Raise a ValueError where iperf3 is not installed."""
    if shutil.which("iperf3") is None:
        raise ValueError("iperf3 is not installed (package iperf3)")


@contextmanager
def iperf3_server(bed: NetBed) -> Iterator[None]:
    """Let iperf3 listen in node n1 for one client."""
    server = bed.popen("n1", ["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    try:
        sleep(0.3)
        yield
    finally:
        server.kill()
        server.wait()


def iperf3(bed: NetBed, connections: int, seconds: float, settle_s: float = 0.0) -> dict[str, Any]:
    """What iperf3 reports at its end, from node n0 to the server in n1, without what came while it settled."""
    command = ["iperf3", "-J", "-c", bed.address("n1"), "-P", f"{connections}", "-t", f"{seconds:g}"]
    command += ["-O", f"{settle_s:g}"]
    done = bed.run("n0", command, capture_output=True, text=True, timeout=seconds + 60)
    return json.loads(done.stdout)["end"]


def _cpu_s(bed: NetBed) -> float:
    """CPU seconds that the bed's line has used so far."""
    times = psutil.Process(bed.status().pid).cpu_times()
    return times.user + times.system
