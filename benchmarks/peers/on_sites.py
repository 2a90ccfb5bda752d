"""Pipeline engines over three emulated sites, with and without pooled uplinks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.case import EngineCase
from benchmarks.peers.comparison import Measured, show_steps
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import profile, wan_topology
from benchmarks.peers.registry import MANY, SITES, Engine
from benchmarks.results import parse, write_json
from weft.comm.links import LinkProfile
from weft.comm.wan.library import load
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

RANKS = (1, 2, 1)
"""Pipeline ranks at each site."""
REPLICAS = 3
_SHORT_S = 15.0  # a step that is worth a warm-up


def main(argv: Sequence[str]) -> int:
    """Run every engine at every latency and return 0."""
    args = parse(_parser(), argv, engines=SITES)
    load()  # compiled here, not while a run is timed
    each = args.forward / 1e3
    hidden_bytes = int(args.transfer * each * args.rate * 1e6 / 8 / 4) * 4
    work = EmulatedWork(forward_s=each, input_s=each, weight_s=each, hidden_bytes=hidden_bytes)
    print(
        f"{REPLICAS} pipelines x 4 stages on sites of {', '.join(str(n * REPLICAS) for n in RANKS)} nodes; uplinks "
        f"{args.rate:g} Mbit/s, windows {args.window:g} kB; a stage's forward, input and weight gradient "
        f"{args.forward:g} ms each; hidden state {work.hidden_bytes / 1e6:.3g} MB, {args.transfer:g} forwards long"
    )
    rows: list[Measured] = []
    for latency_ms in args.latency:
        case = EngineCase(
            num_ranks=4, num_layers=4, work=work, num_replicas=REPLICAS, sites=RANKS, in_a_row=True, num_warmup=1
        )
        topology = wan_topology([count * REPLICAS for count in RANKS], args.rate, latency_ms, args.window)
        with NetBed.up(topology) as bed:
            link = profile(bed)
            neighbours = bed.nodes[RANKS[0] * REPLICAS :][:2]
            near = measure_link(work.hidden_bytes, Way.gloo, run=partial(run_ranks_in, bed, neighbours))
            single, best, opposed = (bps / 1e6 for bps in (link.single_bps, link.aggregate_bps, link.opposed_bps))
            print(
                f"{latency_ms:g} ms: one connection {single:.2f} Mbit/s, {MANY} connections {best:.1f}, with as much "
                f"coming the other way {opposed:.1f}"
            )
            for microbatches in args.microbatches:
                one = replace(case, link=near, num_microbatches=microbatches)
                title = f"{latency_ms:g} ms, {microbatches} micro-batches"
                for name in args.engines:
                    rows.append(_run(bed, name, one, link, title, args.steps))
                    write_json(args, "engines", rows)  # at once: a run of many engines may be cut short
    show_steps(rows)
    write_json(args, "engines", rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks engines sites", description=__doc__)
    parser.add_argument("--latency", type=float, nargs="+", default=[40.0], help="one-way delay between sites in ms")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4], help="of a step and pipeline")
    parser.add_argument("--engines", nargs="+", default=list(SITES), metavar="NAME", help=f"of {', '.join(SITES)}")
    parser.add_argument("--steps", type=int, default=3, help="measured steps; one where a step takes many seconds")
    parser.add_argument("--rate", type=float, default=50.0, help="uplink of a node in Mbit/s")
    parser.add_argument("--window", type=float, default=50.0, help="receive buffer of a connection in kB")
    parser.add_argument("--forward", type=float, default=60.0, help="a stage's forward in ms")
    parser.add_argument("--transfer", type=float, default=3.0, help="a transfer over one uplink, in forwards")
    return parser


def _run(bed: NetBed, name: str, case: EngineCase, link: LinkProfile, title: str, steps: int) -> Measured:
    engine = SITES[name]
    placement = Placement.straight(case.num_ranks, case.sites)
    many = engine.connections == MANY
    usual_bps, most_bps = (link.training_bps, link.aggregate_bps) if many else (link.single_bps, link.single_bps)
    wan = LinkCost(latency_s=link.latency_s, bandwidth_bps=usual_bps)
    costs = case.work.costs(case.num_layers, placement.num_stages, local=case.link, wan=wan)
    simulated_s = _simulated_s(engine, placement, case.num_microbatches, costs)
    least = replace(costs, wan=replace(wan, bandwidth_bps=most_bps))
    shared = replace(placement, pipelines=engine.cell)
    bound_s = lower_bound_s(Problem(shared, case.num_microbatches, least.for_cell(engine.cell)))
    warm = many or simulated_s < _SHORT_S
    case = replace(case, wan=wan, num_steps=steps if many else 1, num_warmup=int(warm))
    timeout_s = 60 + 4 * (case.num_steps + 1) * simulated_s
    runs = run_ranks_in(bed, bed.nodes, engine.run, case, timeout_s, timeout_s=timeout_s)
    slowest = max(runs, key=lambda run: median(run.step_s))
    times = ", ".join(f"{seconds:.2f}" for seconds in slowest.step_s)
    print(f"{title}, {engine.title}: {times} s, simulated {simulated_s:.2f}", file=sys.stderr, flush=True)
    return Measured(
        engine=name,
        title=engine.title,
        case=title,
        step_s=slowest.step_s,
        references={"simulated": simulated_s, "bound": bound_s},
        ratios=("simulated", "bound"),
        compared_s=max(run.pipeline_s for run in runs) or None,
    )


def _simulated_s(engine: Engine, placement: Placement, microbatches: int, costs: CostModel) -> float:
    """Return the seconds of a step on the probed links; gloo's wait until a receive is posted is not simulated."""
    shared = costs.for_cell(engine.cell)
    if engine.schedule == "auto" and engine.cell > 1:
        cell = generate("auto", replace(placement, pipelines=engine.cell), microbatches, costs=shared)
    else:
        cell = side_by_side(generate(engine.schedule, placement, microbatches, costs=costs), engine.cell)
    return simulate(add_relays(lower(cell), shared), shared).step_s
