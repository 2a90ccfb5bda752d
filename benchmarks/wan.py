"""The WAN channel compared with iperf3 on one netbed, by latency and number of connections."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from benchmarks.results import finish, parse, show
from weft.comm.channel import TensorSpec
from weft.comm.key import WanKey
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.library import load
from weft.tools.netbed import Job, NetBed, Topology
from weft.tools.tables import table_of

_FORK = multiprocessing.get_context("fork")
_MESSAGE_BYTES = 1 << 20
_KEY = WanKey(b"the key of a bed that nobody else can reach")
_AHEAD = 64  # receives that are posted and wait; their memory is taken again, as from one step to the next
_SETTLE_S = 1.5  # slow start and the first losses are left out, for both


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The throughput of one program.

    Attributes:
        goodput_mbps: payload that arrived, in megabits per second.
        cpu_s_per_gb: processor seconds of sender and receiver together, per gigabyte.
    """

    goodput_mbps: float
    cpu_s_per_gb: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case: the rates of both programs on the same netbed, measured one after the other."""

    latency_ms: float
    connections: int
    spinning: bool
    iperf3: Rate
    weft: Rate

    @property
    def ratio(self) -> float:
        """Weft's goodput over iperf3's."""
        return self.weft.goodput_mbps / self.iperf3.goodput_mbps


def main(argv: Sequence[str]) -> int:
    """Run ``wan ...`` and return the exit code."""
    args = parse(_parser(), argv)
    load()  # compiled here, not while a run is timed
    if shutil.which("iperf3") is None:
        raise ValueError("iperf3 is not installed (package iperf3)")
    rows = []
    for latency_ms in args.latency:
        topology = Topology.even(
            (1, 1), uplink_mbps=args.rate, latency_ms=latency_ms, window_kb=args.window, congestion=args.congestion
        )
        with NetBed.up(topology) as bed:
            for connections in args.connections:
                for spinning in (False, True) if args.spin else (False,):
                    rows.append(_case(bed, latency_ms, connections, spinning, args))
    print(f"{args.rate:g} Mbit/s uplink, receive buffer {args.window:g} kB, {args.congestion}")
    show(table_of(map(_cells, rows), left=0))
    return finish(args, "wan", [asdict(row) | {"ratio": row.ratio} for row in rows])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks wan", description=__doc__)
    parser.add_argument("--latency", type=float, nargs="+", default=[10, 20, 40], help="one-way delays in ms")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16], help="connections per pair")
    parser.add_argument("--rate", type=float, default=500, help="uplink of a node in Mbit/s")
    parser.add_argument("--window", type=float, default=400, help="receive buffer of a connection in kB")
    parser.add_argument("--congestion", default="cubic", help="the kernel's congestion control")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each program, alternately; medians count")
    parser.add_argument("--spin", action="store_true", help="also with both main threads spinning in pure Python")
    parser.add_argument("--tls", action="store_true", help="Weft encrypts (iperf3 does not)")
    return parser


def _case(bed: NetBed, latency_ms: float, connections: int, spinning: bool, args: argparse.Namespace) -> Row:
    """Run both programs in turns, so that other load on the machine affects both."""
    peers, ours = [], []
    for _ in range(args.repeats):
        peers.append(_iperf3(bed, connections, args.seconds, spinning))
        ours.append(_weft(bed, connections, spinning, args))
    return Row(
        latency_ms=latency_ms, connections=connections, spinning=spinning, iperf3=_median(peers), weft=_median(ours)
    )


def _median(rates: list[Rate]) -> Rate:
    return Rate(
        goodput_mbps=statistics.median(rate.goodput_mbps for rate in rates),
        cpu_s_per_gb=statistics.median(rate.cpu_s_per_gb for rate in rates),
    )


def _iperf3(bed: NetBed, connections: int, seconds: float, spinning: bool) -> Rate:
    """Return iperf3's goodput at the receiver; two other processes spin if Weft's main threads spin."""
    spinners = [_FORK.Process(target=_spin, args=(3600.0,), daemon=True) for _ in range(2 if spinning else 0)]
    server = bed.popen("n1", ["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    command = ["iperf3", "-J", "-c", bed.address("n1"), "-P", f"{connections}", "-t", f"{seconds:g}"]
    try:
        sleep(0.3)
        for spinner in spinners:
            spinner.start()
        command += ["-O", f"{_SETTLE_S:g}"]  # the settling time is left out
        done = bed.run("n0", command, capture_output=True, text=True, timeout=seconds + 60)
    finally:
        server.kill()
        server.wait()
        for spinner in spinners:
            spinner.kill()
            spinner.join()
    end = json.loads(done.stdout)["end"]
    received, cpu = end["sum_received"], end["cpu_utilization_percent"]
    # Its CPU share covers the whole run, its bytes the run without the settling time.
    carried = received["bytes"] * (received["seconds"] + _SETTLE_S) / received["seconds"]
    cpu_s = (cpu["host_total"] + cpu["remote_total"]) / 100 * (received["seconds"] + _SETTLE_S)
    return Rate(goodput_mbps=received["bits_per_second"] / 1e6, cpu_s_per_gb=cpu_s / carried * 1e9)


def _weft(bed: NetBed, connections: int, spinning: bool, args: argparse.Namespace) -> Rate:
    """Return the same over a WAN channel: enough messages to fill the line, received into reused memory."""
    messages = int(args.rate * 1e6 / 8 * (_SETTLE_S + args.seconds + 1.0) / _MESSAGE_BYTES) + 16
    plan = (messages, _SETTLE_S, args.seconds, spinning)
    settings = {"connections": connections, "tls": args.tls, "congestion": args.congestion}
    with (
        Job(bed, "n1", _receive, bed.address("n1"), settings, *plan) as receiver,
        Job(bed, "n0", _send, bed.address("n0"), receiver.receive(), settings, *plan) as sender,
    ):
        (num_bytes, elapsed_s, cpu_s), (_, _, sender_cpu_s) = receiver.result(), sender.result()
    cpu_s_per_gb = (cpu_s + sender_cpu_s) / num_bytes * 1e9 if num_bytes else float("nan")
    return Rate(goodput_mbps=num_bytes * 8 / elapsed_s / 1e6, cpu_s_per_gb=cpu_s_per_gb)


def _receive(
    send: Callable, receive: Callable, bind: str, settings: dict, _: int, *plan: Any
) -> tuple[int, float, float]:
    with WanEndpoint(rank=1, bind=bind, key=_KEY, **settings) as endpoint:
        endpoint.link(0)
        channel = endpoint.channel(0)
        spec = TensorSpec((_MESSAGE_BYTES,), torch.uint8)
        used = [channel.staging.receive_buffer(spec).zero_() for _ in range(_AHEAD)]
        del used  # a slow connection would not fill the first of them before it is measured
        handles = deque(channel.recv("x", spec) for _ in range(_AHEAD))
        send(endpoint.address)

        def post() -> None:
            while handles[0].ended():
                handles.popleft().wait()
                handles.append(channel.recv("x", spec))

        handles[0].wait()
        return _watch(endpoint, 0, post, *plan)


def _send(
    send: Callable, receive: Callable, bind: str, address: tuple[str, int], settings: dict, messages: int, *plan: Any
) -> tuple[int, float, float]:
    with WanEndpoint(rank=0, bind=bind, key=_KEY, **settings) as endpoint:
        endpoint.link(1, address=address)
        channel = endpoint.channel(1)
        tensor = torch.randint(0, 256, (_MESSAGE_BYTES,), dtype=torch.uint8)
        handles = [channel.send("x", tensor) for _ in range(messages)]
        handles[0].wait()
        return _watch(endpoint, 1, lambda: None, *plan)


def _watch(
    endpoint: WanEndpoint, peer: int, post: Callable[[], None], settle_s: float, seconds: float, spinning: bool
) -> tuple[int, float, float]:
    """Return the bytes that arrive within ``seconds``, the elapsed time, and the transport's processor time."""
    _pass(settle_s, spinning, post)
    bytes_before, start, cpu_before = endpoint.counters(peer).received_bytes, monotonic(), transport_cpu_s()
    _pass(seconds, spinning, post)
    arrived, elapsed_s = endpoint.counters(peer).received_bytes - bytes_before, monotonic() - start
    cpu_s = transport_cpu_s() - cpu_before
    endpoint.close(linger_s=0.0)  # messages posted after the measured time are ignored
    return arrived, elapsed_s, cpu_s


def _pass(seconds: float, spinning: bool, post: Callable[[], None]) -> None:
    limit = monotonic() + seconds
    while monotonic() < limit:
        _spin(0.01) if spinning else sleep(0.01)
        post()


def transport_cpu_s() -> float:
    """Return the processor seconds of this process's WAN transport thread since its start.

    They are read from ``schedstat``, because the ticks of ``stat`` are too coarse if the connection is slow.
    """
    tasks = Path("/proc/self/task").iterdir()
    of_transport = [task for task in tasks if (task / "comm").read_text().startswith("weft wan")]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in of_transport) / 1e9


def _spin(seconds: float) -> None:
    """Hold the interpreter's lock for ``seconds``, as pure Python does."""
    limit = monotonic() + seconds
    while monotonic() < limit:
        pass


def _cells(row: Row) -> dict[str, object]:
    return {
        "delay ms": f"{row.latency_ms:g}",
        "connections": row.connections,
        "main threads": "spin" if row.spinning else "wait",
        "iperf3 Mbit/s": f"{row.iperf3.goodput_mbps:.0f}",
        "weft Mbit/s": f"{row.weft.goodput_mbps:.0f}",
        "ratio": f"{row.ratio:.3f}",
        "iperf3 CPU s/GB": f"{row.iperf3.cpu_s_per_gb:.2f}",
        "weft CPU s/GB": f"{row.weft.cpu_s_per_gb:.2f}",
    }
