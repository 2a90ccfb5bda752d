"""Costs of collectives on a topology, the part that compute hides, and the gain of partitioning."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.results import finish, parse, show
from weft.comm.collectives import Choice, Collective, CollectiveCosts, Group, Primitive, Rewrite, choose, plain
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.probe import fitted, measure, nodes_of_world
from weft.conf.schema import DataConfig
from weft.engine.distributed import init_distributed, leave_distributed
from weft.engine.parallel.communicated import CommunicatedGroup
from weft.engine.strands.overlap_cache import overlap_cache, overlap_key
from weft.engine.strands.overlap_probe import measure_overlap
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.segments import LinkScope
from weft.tools.netbed import NetBed, Topology
from weft.tools.tables import table_of

PRIMITIVES = (Primitive.reduce_scatter, Primitive.all_gather, Primitive.all_reduce)
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Row:
    """The plain collective and the selected rewrite, measured in turns.

    Attributes:
        plain_s, chosen_s: median seconds of the slowest rank.
    """

    choice: Choice
    plain_s: float
    chosen_s: float


@dataclass(frozen=True)
class Found:
    """The measurements of a topology's ranks.

    Attributes:
        topology: cache key of the costs.
        device: cache key of the overlap.
        overlap: OEF of each kind of compute with a collective of each class of links.
    """

    topology: str
    costs: CollectiveCosts
    device: str
    overlap: OverlapTable
    rows: list[Row]


def main(argv: Sequence[str]) -> int:
    """Run ``collectives`` and return the exit code.

    The ranks are those of a launcher's job, or nodes of a new netbed without a launcher.
    """
    args = parse(_parser(), argv)
    if "RANK" in os.environ:
        found = _probe_and_race(args)
        first = dist.get_rank() == 0
        dist.destroy_process_group()  # a thread of gloo's that lives on when Python ends may abort the process
        leave_distributed()  # others hold groups, too
        if not first:
            return 0
    else:
        nodes = [f"n{node}" for node in range(args.nodes) for _ in range(args.ranks)]
        with NetBed.up(Topology.even([1] * args.nodes, uplink_mbps=args.rate, latency_ms=args.latency)) as bed:
            found = run_ranks_in(bed, nodes, _probe_and_race, args, timeout_s=TIMEOUT_S)[0]
    CostCache.in_folder(args.cache).write(found.topology, found.costs)
    overlap_cache(args.cache).write(found.device, found.overlap)
    _print(found)
    figures = [{"rewrite": str(row.choice.rewrite), **asdict(row.choice), **asdict(row)} for row in found.rows]
    return finish(args, "collectives", figures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks collectives", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the netbed")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each")
    parser.add_argument("--rate", type=float, default=200, help="uplink of a node in Mbit/s")
    parser.add_argument("--latency", type=float, default=0.5, help="one-way delay between nodes in ms")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 16, 1 << 20, 1 << 22], help="bytes to race")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; medians count")
    parser.add_argument("--cache", default=DataConfig().cache_dir, help="folder that keeps the costs")
    return parser


def _probe_and_race(args: argparse.Namespace) -> Found:
    device = init_distributed(TIMEOUT_S)
    group = Group(tuple(range(dist.get_world_size())), nodes_of_world())
    communicator = Communicator.open([group], device=device, timeout_s=TIMEOUT_S)
    assert communicator is not None, "the group is the world"
    costs = fitted(measure(communicator, device=device, repeats=args.repeats))
    rows = []
    for primitive in PRIMITIVES:
        for num_bytes in args.sizes:
            wish = Collective.flat(primitive, group, num_elements=num_bytes // 4, itemsize=4)
            choice = choose(wish, costs)
            pair = [plain(wish), choice.rewrite]
            timed = [[_run_s(communicator, rewrite, device) for rewrite in pair] for _ in range(1 + args.repeats)]
            plain_s, chosen_s = (median(run[which] for run in timed[1:]) for which in (0, 1))
            rows.append(Row(choice, plain_s, chosen_s))
    overlap = _overlap(communicator, device, max(args.sizes), args.repeats)
    communicator.close()
    return Found(topology_key(group, device.type), costs, overlap_key(device), overlap, rows)


def _overlap(world: Communicator, device: torch.device, num_bytes: int, repeats: int) -> OverlapTable:
    """Return the overlap of collectives between hosts, and inside hosts with several ranks."""
    nodes, groups = world.group.nodes, {}
    inside = None
    if min(world.group.layout) > 1:
        ranks = {node: tuple(rank for rank, its in enumerate(nodes) if its == node) for node in nodes}
        hosts = [Group(members, (node,) * len(members)) for node, members in ranks.items()]
        inside = Communicator.open(hosts, device=device, timeout_s=TIMEOUT_S, name="a host's ranks")
        assert inside is not None, "every rank is on one of the hosts"
    if len(set(nodes)) > 1:  # first: all ranks go by the slowest of the first group
        groups[LinkScope.between_hosts] = CommunicatedGroup("job", world, {})
    if inside is not None:
        groups[LinkScope.inside_host] = CommunicatedGroup("host", inside, {})
    overlap = measure_overlap(groups, device, num_bytes=num_bytes, repeats=repeats)
    if inside is not None:
        inside.close()
    return overlap


def _run_s(communicator: Communicator, rewrite: Rewrite, device: torch.device) -> float:
    collective = rewrite.collective
    whole = torch.zeros(collective.dims, device=device)
    shard = torch.zeros(collective.dims[0] // collective.group.size, device=device)
    tensors = {
        Primitive.reduce_scatter: (whole, shard),
        Primitive.all_gather: (shard, whole),
        Primitive.all_reduce: (whole, whole),
    }[collective.primitive]
    dist.barrier()
    start = perf_counter()
    communicator.start(rewrite, *tensors).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = torch.tensor(perf_counter() - start, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _print(found: Found) -> None:
    lines = (
        {
            "links": link.value,
            "primitive": primitive.value,
            "alpha ms": f"{1e3 * line.alpha_s:.3f}",
            "beta ns/B": f"{1e9 * line.beta_s:.2f}",
        }
        for (link, primitive), line in found.costs.table.items()
    )
    raced = (
        {
            "collective": row.choice.rewrite.collective.primitive.value,
            "chosen": row.choice.rewrite,
            "KiB": f"{row.choice.rewrite.collective.num_bytes / 1024:.0f}",
            "plain ms": f"{1e3 * row.plain_s:.1f}",
            "chosen ms": f"{1e3 * row.chosen_s:.1f}",
            "gain": f"{row.plain_s / row.chosen_s:.2f}x",
            "/ predicted": f"{row.chosen_s / row.choice.cost_s:.2f}",
        }
        for row in found.rows
    )
    factors = (
        {"compute": kind.value, "collective": link.value, "OEF": f"{factor:.2f}"}
        for (kind, link), factor in found.overlap.compute.items()
    )
    beside = table_of(factors, "compute alongside a collective", left=2)
    show(table_of(lines, found.topology, left=2), beside, table_of(raced, left=2))
