"""A training step over three sites, by engine, with and without sharing the uplinks in time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers import rendezvous
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import wan_topology
from benchmarks.peers.sites import MANY, WAN_PEERS, WanPeer, profile, run_on
from benchmarks.peers.uplinks import Step, draw
from benchmarks.results import parse, show, write_json
from weft.comm.wan.library import load
from weft.comm.wan.probe import LinkProfile
from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.generators import generate
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.tools.links import Way, measure_link
from weft.tools.netbed import NetBed
from weft.tools.tables import table_of

SITES = (1, 2, 1)
REPLICAS = 3
_SHORT_S = 15.0  # a step that is worth a warm-up


@dataclass(frozen=True)
class Result:
    """One engine on one line.

    Attributes:
        pipeline_s: of a step, from its first action to its last; 0 for engines that do not tell.
        predicted_s: the same, simulated with the links as probed.
        bound_s: what no schedule with that link and that sharing can beat.
    """

    latency_ms: float
    microbatches: int
    peer: str
    step_s: tuple[float, ...]
    pipeline_s: float
    predicted_s: float
    bound_s: float

    @property
    def median_s(self) -> float:
        """Of the measured steps."""
        return median(self.step_s)


def main(argv: Sequence[str]) -> int:
    """Run ``sites ...``; returns the exit code."""
    args = parse(_parser(), argv, engines=WAN_PEERS)
    load()  # compiled here, not while a run is timed
    work = EmulatedWork(
        forward_s=args.forward / 1e3,
        input_s=args.forward / 1e3,
        weight_s=args.forward / 1e3,
        hidden_bytes=int(args.transfer * args.forward / 1e3 * args.rate * 1e6 / 8 / 4) * 4,
    )
    print(
        f"{REPLICAS} pipelines x 4 stages on sites of {', '.join(str(n * REPLICAS) for n in SITES)} nodes; uplinks "
        f"{args.rate:g} Mbit/s, windows {args.window:g} kB; a stage's forward, input and weight gradient "
        f"{args.forward:g} ms each; hidden state {work.hidden_bytes / 1e6:.3g} MB, {args.transfer:g} forwards long"
    )
    results: list[Result] = []
    steps: list[Step] = []
    for latency_ms in args.latency:
        case = EngineCase(
            num_ranks=4, num_layers=4, work=work, num_replicas=REPLICAS, sites=SITES, in_a_row=True, num_warmup=1
        )
        topology = wan_topology([count * REPLICAS for count in SITES], args.rate, latency_ms, args.window)
        with NetBed.up(topology) as bed:
            link = profile(bed)
            neighbours = bed.nodes[SITES[0] * REPLICAS :][:2]
            near = measure_link(work.hidden_bytes, Way.gloo, run=partial(run_ranks_in, bed, neighbours))
            case = replace(case, link=near)
            single, best, opposed = (bps / 1e6 for bps in (link.single_bps, link.aggregate_bps, link.opposed_bps))
            near_ms = 1e3 * (near.latency_s + near.occupancy_s(work.hidden_bytes))
            print(
                f"{latency_ms:g} ms: one connection {single:.2f} Mbit/s, {MANY} connections {best:.1f}, with as much "
                f"coming the other way {opposed:.1f}; a hidden state takes {near_ms:.1f} ms inside a site"
            )
            for microbatches in args.microbatches:
                for name in args.engines:
                    one = replace(case, num_microbatches=microbatches)
                    result, step = _run(bed, name, one, link, latency_ms, args)
                    results.append(result)
                    steps.append(step)
                    write_json(args, "sites", results)  # at once: a run of many engines may be cut short
                _print(results[-len(args.engines) :], f"{latency_ms:g} ms, {microbatches} micro-batches")
    if args.picture:
        draw(steps, Path(args.picture), rate_mbps=args.rate)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sites", description=__doc__)
    parser.add_argument("--latency", type=float, nargs="+", default=[40.0], help="one-way delay between sites in ms")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4], help="of a step and pipeline")
    parser.add_argument(
        "--engines", nargs="+", default=list(WAN_PEERS), metavar="NAME", help=f"of {', '.join(WAN_PEERS)}"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps; one where a step takes many seconds")
    parser.add_argument("--rate", type=float, default=50.0, help="uplink of a node in Mbit/s")
    parser.add_argument("--window", type=float, default=50.0, help="receive buffer of a connection in kB")
    parser.add_argument("--forward", type=float, default=60.0, help="a stage's forward in ms")
    parser.add_argument("--transfer", type=float, default=3.0, help="a transfer over one uplink, in forwards")
    parser.add_argument("--picture", metavar="FILE", help="draw what the uplinks carry in the last step of each engine")
    return parser


def _run(
    bed: NetBed, name: str, case: EngineCase, link: LinkProfile, latency_ms: float, args: argparse.Namespace
) -> tuple[Result, Step]:
    peer = WAN_PEERS[name]
    placement = Placement.straight(case.num_ranks, case.sites)
    many = peer.connections == MANY
    # p2p operations of gloo use one context of all that there are
    usual_bps, most_bps = (link.training_bps, link.aggregate_bps) if many else (link.single_bps, link.single_bps)
    wan = LinkCost(latency_s=link.latency_s, bandwidth_bps=usual_bps)
    costs = case.work.costs(case.num_layers, placement.num_stages, local=case.link, wan=wan)
    predicted_s = _predict(peer, placement, case.num_microbatches, costs)
    least = replace(costs, wan=replace(wan, bandwidth_bps=most_bps))
    shared = replace(placement, pipelines=peer.cell)
    bound_s = lower_bound_s(Problem(shared, case.num_microbatches, least.for_cell(peer.cell)))
    warm = many or predicted_s < _SHORT_S
    case = replace(case, wan=wan, num_steps=args.steps if many else 1, num_warmup=int(warm))
    timeout_s = 60 + 4 * (case.num_steps + 1) * predicted_s
    runs, uplinks = run_on(bed, peer, case, timeout_s=timeout_s)
    slowest = max(runs, key=lambda run: median(run.step_s))
    result = Result(
        latency_ms=latency_ms,
        microbatches=case.num_microbatches,
        peer=peer.title,
        step_s=slowest.step_s,
        pipeline_s=max(run.pipeline_s for run in runs),
        predicted_s=predicted_s,
        bound_s=bound_s,
    )
    times = ", ".join(f"{seconds:.2f}" for seconds in result.step_s)
    print(
        f"{case.num_microbatches} micro-batches, {result.peer}: {times} s, pipeline {result.pipeline_s:.2f}, "
        f"predicted {predicted_s:.2f}",
        file=sys.stderr,
        flush=True,
    )
    ended_s = max(run.ended_s for run in runs)
    return result, Step(peer.title, ended_s - slowest.step_s[-1], ended_s, uplinks)


def _predict(peer: WanPeer, placement: Placement, microbatches: int, costs: CostModel) -> float:
    if not isinstance(peer.schedule, str):
        return rendezvous.step_s(peer.schedule, placement, microbatches, costs)
    shared = costs.for_cell(peer.cell)
    if peer.schedule == "auto" and peer.cell > 1:
        cell = generate("auto", replace(placement, pipelines=peer.cell), microbatches, costs=shared)
    else:
        cell = side_by_side(generate(peer.schedule, placement, microbatches, costs=costs), peer.cell)
    return simulate(add_relays(lower(cell), shared), shared).step_s


def _print(results: Sequence[Result], title: str) -> None:
    best_s = min(result.median_s for result in results)
    show(table_of((_cells(result, best_s) for result in results), title))


def _cells(result: Result, best_s: float) -> dict[str, str]:
    spread = (max(result.step_s) - min(result.step_s)) / result.median_s
    own = result.pipeline_s or result.median_s
    return {
        "engine": result.peer,
        "step s": f"{result.median_s:.2f}",
        "spread": f"{spread:.0%}" if len(result.step_s) > 1 else "one step",
        "/ best": f"{result.median_s / best_s:.2f}x",
        "pipeline s": f"{result.pipeline_s:.2f}" if result.pipeline_s else "",
        "predicted s": f"{result.predicted_s:.2f}",
        "pipeline / predicted": f"{own / result.predicted_s:.2f}",
        "bound s": f"{result.bound_s:.2f}",
    }
