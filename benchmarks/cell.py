"""Transfers over one uplink and over all uplinks of a DP-cell, and their order."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from time import monotonic, sleep

import torch

from benchmarks.results import finish, parse, show
from benchmarks.wan import transport_cpu_s
from weft.comm.channel import Channel, Handle, TensorSpec
from weft.comm.wan.cell import Cell, join
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.key import WanKey
from weft.comm.wan.library import load
from weft.comm.wan.network import INSIDE_CONNECTIONS
from weft.tools.netbed import Job, NetBed, Topology
from weft.tools.tables import table_of

_KEY = WanKey(b"the key of a bed that nobody else can reach")
_BYTE = TensorSpec((1,), torch.uint8)


def main(argv: Sequence[str]) -> int:
    """Run ``cell ...``; returns the exit code."""
    args = parse(_parser(), argv)
    load()  # compile here, not while a run is timed
    print(f"{args.messages} tensors of {args.mb:g} MB, {args.rate:g} Mbit/s uplinks, {args.latency:g} ms one way")
    table = table_of(_row(pipelines, args) for pipelines in args.pipelines)
    show(table)
    return finish(args, "cell", table)


def _row(pipelines: int, args: argparse.Namespace) -> dict[str, object]:
    alone_s, together_s, relay_cpu_s, arrivals_s = _times(pipelines, args)
    relayed_gb = args.repeats * args.messages * args.mb / 1e3 / pipelines  # by each relay
    ideal_ms = [args.latency + turn * args.mb * 8e3 / args.rate / pipelines for turn in range(1, pipelines + 1)]
    return {
        "pipelines": pipelines,
        "one uplink s": f"{alone_s:.2f}",
        "all uplinks s": f"{together_s:.2f}",
        "speed-up": f"{alone_s / together_s:.2f}",
        "of the ideal": f"{alone_s / together_s / pipelines:.0%}",
        "relay CPU s/GB": f"{relay_cpu_s / relayed_gb:.2f}" if pipelines > 1 else "-",
        "arrivals of a tensor of each, sent at once, ms": ", ".join(f"{1e3 * at:.0f}" for at in arrivals_s),
        "ideal ms": ", ".join(f"{at:.0f}" for at in ideal_ms),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cell", description=__doc__)
    parser.add_argument("--pipelines", type=int, nargs="+", default=[2, 4], help="pipelines in the cell")
    parser.add_argument("--rate", type=float, default=100, help="uplink of a node in Mbit/s")
    parser.add_argument("--latency", type=float, default=20, help="one-way delay in ms")
    parser.add_argument("--window", type=float, default=400, help="receive buffer of a connection in kB")
    parser.add_argument("--mb", type=float, default=8, help="megabytes of a tensor")
    parser.add_argument("--connections", type=int, default=8, help="TCP connections of a link")
    parser.add_argument("--tls", action="store_true", help="encrypt")
    parser.add_argument("--chunk", type=int, default=128, help="kB of a chunk")
    parser.add_argument("--messages", type=int, default=6, help="tensors that are sent at once")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way, by turns; medians count")
    return parser


def _times(pipelines: int, args: argparse.Namespace) -> tuple[float, float, float, list[float]]:
    """Seconds from the first send to the answer to the last, over one uplink and over all.

    Then the processor seconds of a relay's transport meanwhile, on average, and the seconds after which a tensor of
    each pipeline arrives, by turn, when all are sent at once.
    """
    cell = Cell(tuple(range(pipelines)), tuple(range(pipelines, 2 * pipelines)))
    ranks = [*cell.near, *cell.far]
    sides = (pipelines, pipelines)
    topology = Topology.even(sides, uplink_mbps=args.rate, latency_ms=args.latency, window_kb=args.window)
    with NetBed.up(topology) as bed:
        jobs = [Job(bed, f"n{rank}", _rank, rank, bed.address(f"n{rank}"), cell, args) for rank in ranks]
        try:
            addresses = dict(zip(ranks, (job.hear() for job in jobs), strict=True))
            for job in jobs:
                job.say(addresses)
            times = jobs[0].hear(timeout_s=120.0)
            for job in jobs:
                job.say(None)
            cpu_s = [job.hear() for job in jobs]
            relays_s = [spent for rank, spent in zip(ranks, cpu_s, strict=True) if rank % pipelines]
            rounds = [_at_once(jobs) for _ in range(1 + args.repeats)][1:]  # drop the first, a warm-up
            for job in jobs:
                job.say(None)  # a relay runs until all others have finished
        finally:
            for job in jobs:
                job.kill()
    relay_s = statistics.mean(relays_s) if relays_s else 0.0
    return *times, relay_s, [statistics.median(arrivals) for arrivals in zip(*rounds, strict=True)]


def _at_once(jobs: Sequence[Job]) -> list[float]:
    """Every pipeline sends one tensor at the same time; returns the arrival times."""
    start_s = monotonic() + 0.5
    for job in jobs:
        job.say(start_s)
    return [job.hear() for job in jobs][len(jobs) // 2 :]


def _rank(say: Callable, hear: Callable, rank: int, bind: str, cell: Cell, args: argparse.Namespace) -> None:
    num_bytes, settings = int(args.mb * 1e6), {"connections": args.connections, "chunk_bytes": args.chunk << 10}
    with WanEndpoint(rank=rank, bind=bind, key=_KEY, congestion="cubic", tls=args.tls, **settings) as endpoint:
        say(endpoint.address)
        addresses = hear()
        for peer in cell.links(rank):
            inside = (peer < len(cell.near)) == (rank < len(cell.near))
            connections = INSIDE_CONNECTIONS if inside else 0  # 0 is as many as the endpoint has
            endpoint.link(peer, address=addresses[peer] if rank < peer else None, connections=connections)
        opposite = cell.links(rank)[0]
        turn = rank % len(cell.near)
        ways = endpoint.channel(opposite), join(endpoint, cell, priorities={"at once": turn})
        runs: list[list[float]] = [[], []]
        before_s = transport_cpu_s()
        if turn == 0:
            for _ in range(args.repeats):
                for way, seconds in zip(ways, runs, strict=True):
                    seconds.append(_cross(way, rank == cell.near[0], num_bytes, args.messages))
        if rank == cell.near[0]:
            say((statistics.median(runs[0]), statistics.median(runs[1])))
        hear()
        say(transport_cpu_s() - before_s)
        tensor = torch.ones(num_bytes, dtype=torch.uint8)
        while (start_s := hear()) is not None:
            if rank in cell.near:
                sleep(max(0.0, start_s - monotonic()))
                ways[1].send("at once", tensor).wait()
            else:
                ways[1].recv("at once", TensorSpec((num_bytes,), torch.uint8)).wait()
            say(monotonic() - start_s)


def _cross(channel: Channel, sending: bool, num_bytes: int, messages: int) -> float:
    """Seconds from the first tensor to the answer; meaningful only on the sender."""
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    byte = torch.zeros(1, dtype=torch.uint8)
    if sending:
        channel.recv("ready", _BYTE).wait()
        start = monotonic()
        answer = channel.recv("answer", _BYTE)
        handles: list[Handle] = [channel.send("tensor", tensor) for _ in range(messages)]
        answer.wait()
    else:
        handles = [channel.recv("tensor", TensorSpec((num_bytes,), torch.uint8)) for _ in range(messages)]
        channel.send("ready", byte).wait()
        start = monotonic()
        for handle in handles:
            handle.wait()
        channel.send("answer", byte).wait()
    for handle in handles:
        handle.wait()
    return monotonic() - start
