"""Transfers over one uplink and over all uplinks of a DP-cell, and their order."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from weft.comm.channel import Channel, Handle, TensorSpec
from weft.comm.wan.cell import Cell, join
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.key import WanKey
from weft.comm.wan.network import INSIDE_CONNECTIONS
from weft.tools.netbed import Job, NetBed, Topology

KEY = WanKey(b"the key of a bed that no other process can reach")
MB, MESSAGES = 8.0, 6
"""Megabytes of a tensor, and tensors that are sent at once."""
_SETTINGS: dict[str, Any] = {"congestion": "cubic", "connections": 8, "chunk_bytes": 128 << 10}
_BYTE = TensorSpec((1,), torch.uint8)


def row(pipelines: int, args: argparse.Namespace) -> dict[str, object]:
    """A row of the table: seconds over one uplink and over all of a cell of so many pipelines."""
    latency_ms = args.latency[0]
    alone_s, together_s, relay_cpu_s, arrivals_s = _times(pipelines, args)
    relayed_gb = args.repeats * MESSAGES * MB / 1e3 / pipelines  # by each relay
    ideal_ms = [latency_ms + turn * MB * 8e3 / args.rate / pipelines for turn in range(1, pipelines + 1)]
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


def _times(pipelines: int, args: argparse.Namespace) -> tuple[float, float, float, list[float]]:
    """Seconds from the first send to the answer to the last, over one uplink and over all.

    Then the processor seconds of a relay's transport meanwhile, on average, and the seconds after which a tensor of
    each pipeline arrives, by turn, when all are sent at once.
    """
    cell = Cell(tuple(range(pipelines)), tuple(range(pipelines, 2 * pipelines)))
    ranks = [*cell.near, *cell.far]
    sides = (pipelines, pipelines)
    topology = Topology.even(sides, uplink_mbps=args.rate, latency_ms=args.latency[0], window_kb=args.window)
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
    num_bytes = int(MB * 1e6)
    with WanEndpoint(rank=rank, bind=bind, key=KEY, **_SETTINGS, tls=args.tls) as endpoint:
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
                    seconds.append(_cross(way, rank == cell.near[0], num_bytes, MESSAGES))
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


def transport_cpu_s() -> float:
    """Processor seconds of this process's transport thread; ticks of ``stat`` are too coarse for a slow connection."""
    tasks = Path("/proc/self/task").iterdir()
    of_transport = [task for task in tasks if (task / "comm").read_text().startswith("weft wan")]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in of_transport) / 1e9
