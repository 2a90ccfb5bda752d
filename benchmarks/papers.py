"""Figures of papers in Weft's models, compared with the papers' own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from benchmarks.atlas import ATLAS, Claim, judged
from benchmarks.results import finish, parse, show
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.hardware import GPU_KINDS
from weft.pipeline.placement import Placement
from weft.pipeline.planner.cluster import Cluster, Site
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.network import over_gpus_s
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.search import plan
from weft.pipeline.simulation import simulate
from weft.pipeline.workload import LayerWork, ModelWork
from weft.tools.tables import table_of

MEGASCALE_MFU = {3072: 59.1, 6144: 57.3, 8192: 54.9, 12288: 55.2}
"""MFU in percent of the model of 175 billion parameters, by number of GPUs (MegaScale table 2)."""
CHUNKS_A_RANK = 6
"""Chunks per rank of MegaScale's interleaved pipeline for this model (its section 6.1)."""


def main(argv: Sequence[str]) -> int:
    """Print the claims, and assumptions that papers leave open, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks papers", description=__doc__)
    parser.add_argument("--stages", type=int, default=60, help="pipeline ranks and micro-batches of Atlas 6.3; its: 60")
    parser.add_argument("--only", choices=list(FIGURES), action="append", help="some figures only")
    args = parse(parser, argv)
    claims: list[Claim] = []
    for name in args.only or FIGURES:
        make, assumed = FIGURES[name]
        found = list(make(args.stages))
        claims += found
        show(table_of([vars(claim) for claim in found], name, left=2), f"assumed: {assumed}")
    return finish(args, "papers", [vars(claim) for claim in claims])


# -- MegaScale, table 2 -------------------------------------------------------------------------


def megascale(_: int) -> Iterator[Claim]:
    """Yield the strong scaling of the model of 175 billion parameters: batch 6144, 3,072 to 12,288 GPUs."""
    width, tokens, heads = 12288, 2048, 64_000
    layer = LayerWork(
        parameters=12 * width**2,
        matmul_flops=24.0 * width**2 * tokens,
        attention_flops=2.0 * tokens**2 * width,
        activation_bytes=34.0 * tokens * width,
    )
    ends = LayerWork(parameters=width * heads, matmul_flops=2.0 * width * heads * tokens)
    work = ModelWork(
        name="175B",
        sequence_length=tokens,
        before=LayerWork(parameters=width * heads),
        layers=(layer,) * 96,
        after=ends,
        tied_parameters=0,
        message_bytes=2.0 * tokens * width,
        attended_bytes=4.0 * tokens * width,
    )
    straight, interleaved = {}, {}
    for gpus in MEGASCALE_MFU:
        site = Site(name="one", hosts=gpus // 8, gpus_per_host=8, gpu=GPU_KINDS["A100"], price=1.0, network_bps=1600e9)
        pins = {"tensor": 8, "num_stages": 8, "microbatch_size": 1, "replicas": gpus // 64, "zero_stage": 1}
        cluster = Cluster(sites=(site,), efficiency=0.68)
        best = plan(cluster, work, Request(sequences=6144, pins=pins, max_memory=1.0)).best
        costs = Estimates(cluster, work).costs(best.layout).cut(8 * CHUNKS_A_RANK)
        schedule = generate("interleaved", Placement.interleaved(8, CHUNKS_A_RANK), best.layout.microbatches)
        exposed_s = best.collective_s / CHUNKS_A_RANK + best.optimizer_s
        straight[gpus] = best.mfu
        interleaved[gpus] = best.mfu * best.step_s / (simulate(schedule, costs).step_s + exposed_s)
    for gpus, percent in MEGASCALE_MFU.items():
        if gpus != 3072:
            ours, paper = interleaved[gpus] / interleaved[3072], percent / MEGASCALE_MFU[3072]
            without = straight[gpus] / straight[3072]
            yield Claim(
                "table 2",
                f"MFU at {gpus:,} GPUs over that at 3,072 (without interleaving and overlap {without:.3f})",
                f"{paper:.3f}",
                f"{ours:.3f}",
                judged(ours, paper, 0.05),
            )


# -- DHelix, figure 8 ----------------------------------------------------------------------


def dhelix(_: int) -> Iterator[Claim]:
    """Yield the bubble ratio of the W schedule, which is that of 1F1B."""
    ranks, count = 4, 16
    straight, fold = Placement.straight(ranks), Placement.named("fold", ranks)
    one = simulate(generate("1f1b", straight, count), CostModel.unit(ranks)).bubble_share
    half = CostModel.unit(ranks).cut(2 * ranks)
    w = simulate(generate("w", fold, count), half).bubble_share
    yield Claim(
        "8",
        f"bubbles of the W over those of 1F1B, {ranks} ranks, {count} micro-batches",
        "1 (unchanged)",
        f"{w:.1%} / {one:.1%}",
        judged(w, one, 0.1),
    )


# -- Centauri, figure 10 -----------------------------------------------------------------------------


def centauri_10(_: int) -> Iterator[Claim]:
    """Yield a comparison of collectives over replicas (DP) with those of groups that shard weights (FSDP)."""
    weights = 6.7e9
    site = Site(name="A", hosts=6, gpus_per_host=8, gpu=GPU_KINDS["A100"], network_bps=200e9)
    for replicas, shards, longest in ((3, 16, "FSDP"), (6, 8, "DP"), (12, 4, "DP")):
        seconds = {
            "FSDP": over_gpus_s(3 * 2.0 * weights, shards, 1, site),  # two all-gathers and a reduce-scatter
            "DP": over_gpus_s(2 * 2.0 * weights / shards, replicas, shards, site),  # an all-reduce of each shard
        }
        ours = max(seconds, key=seconds.__getitem__)
        yield Claim(
            "10",
            f"DP{replicas}+FSDP{shards}: FSDP {seconds['FSDP']:.2f} s, DP {seconds['DP']:.2f} s",
            f"{longest} matters more",
            ours,
            "reproduced" if ours == longest else "not",
        )


FIGURES: dict[str, tuple[Callable[[int], Iterator[Claim]], str]] = {
    **ATLAS,
    "megascale-table-2": (
        megascale,
        "TP 8, PP 8 interleaved, 6 chunks a rank; GPUs reach 68 % of their peak; of collectives over replicas those of "
        "one chunk are not hidden; 1.6 Tbit/s a host",
    ),
    "dhelix-8": (dhelix, "every chunk of the fold is half a stage; strand pairs take as long as their halves"),
    "centauri-10": (
        centauri_10,
        "its cluster A: six hosts of eight A100 on 200 Gbit/s; a model of 6.7 billion parameters in two bytes; one "
        "micro-batch a step",
    ),
}
"""By name: the function that yields the claims, and the assumption that the paper leaves open."""
