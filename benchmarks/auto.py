"""`auto` compared with every fixed schedule on every placement, on random clusters of 1 to 4 sites."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean

from benchmarks.results import finish, parse, show
from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.choice import Option, choose, placements
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate, generators
from weft.pipeline.limits import count
from weft.pipeline.lowering import as_run, lower
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.segments import Kind, LinkScope, Segment, StageStrands, Strand, StrandPair, WeightGradient
from weft.pipeline.validation import validate
from weft.tools.tables import table_of

ROUNDING = 1 + 1e-9
"""Ratios closer to 1 than this are of equals."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A model, layer by layer, on sites with links of their own; seconds and bytes are arbitrary units."""

    sites: tuple[int, ...]
    num_microbatches: int
    layers: CostModel
    cap_bytes: float

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all sites."""
        return sum(self.sites)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The steps of `auto` and of the best fixed schedule on any placement, under one cap.

    Attributes:
        fixed: kind and placement of the best fixed schedule under the cap, or empty if none keeps to it.
        fixed_s: step of the best fixed schedule; infinite without one.
        auto: step of `auto` over all placements.
        slower: fixed kinds and placements that were faster, where `auto` was held to the same placement.
    """

    cluster: Cluster
    fixed: str
    fixed_s: float
    auto: Option
    slower: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Print how often `auto` is faster, equal and slower, and return 1 if it is ever slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks auto", description=__doc__)
    parser.add_argument("--clusters", type=int, default=200, help="number of clusters")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    args = parse(parser, argv)
    count(args.clusters, "--clusters")
    count(args.first, "--first", least=0)
    seeds = range(args.first, args.first + args.clusters)
    outcomes = [compare(random_cluster(seed)) for seed in seeds]
    title = "auto over the best fixed schedule on any placement, on every placement itself, under the same cap"
    show(
        table_of(_rows(outcomes), title),
        "placements that auto took: " + _counts(outcome.auto.name for outcome in outcomes),
        "best fixed schedules: " + _counts(outcome.fixed or "none under the cap" for outcome in outcomes),
    )
    slower = [(seed, o) for seed, o in zip(seeds, outcomes, strict=True) if o.auto.step_s > o.fixed_s * ROUNDING]
    show(*(f"slower: cluster {seed}: {o.auto.step_s:g} s, {o.fixed} {o.fixed_s:g} s" for seed, o in slower))
    held = [(seed, name) for seed, o in zip(seeds, outcomes, strict=True) for name in o.slower]
    show(*(f"slower on its placement: cluster {seed}: {name}" for seed, name in held))
    return finish(args, "auto", outcomes, met=not (slower or held))


_NORM, _BLOCK = Segment(0.1, LinkScope.inside_host, 0.4, Kind.memory), Segment(0.9, LinkScope.inside_host, 0.4)
_PASS = Strand((_NORM, _BLOCK) * 2)
_STRANDS = StageStrands(((StrandPair(_PASS, _PASS, (WeightGradient(1, 1.0), WeightGradient(3, 1.0))), 1),))
"""A layer of which collectives take a good third, under tensor and sequence parallelism."""


def random_cluster(seed: int) -> Cluster:
    """Return 1 to 4 sites of 1 to 3 ranks with uneven layers, random links, and a cap that some schedule keeps."""
    random = Random(seed)
    sites = tuple(random.randint(1, 3) for _ in range(random.randint(1, 4)))
    num_ranks = sum(sites)
    even = random.random() < 0.5
    usual = _layer(random)
    layers = tuple(usual if even else _layer(random) for _ in range(2 * num_ranks * random.randint(1, 2)))
    pairs = tuple(((a, b), _link(random)) for a in range(len(sites)) for b in range(len(sites)) if abs(a - b) == 1)
    costs = CostModel(
        stages=layers,
        local=LinkCost(latency_s=random.choice([0.0, 0.25])),
        wan=_link(random),
        wan_links=pairs if random.random() < 0.7 else (),
        pairs=random.choice([None, None, StrandCosts((_STRANDS,) * len(layers))]),
    )
    held = max(
        sum(costs.cut(placement.num_stages).stages[stage].activation_bytes for stage in of_rank)
        for placement in placements(num_ranks, sites).values()
        for of_rank in placement.rank_stages
    )
    return Cluster(
        sites=sites,
        num_microbatches=random.randint(1, 16),
        layers=costs,
        # Two thirds hold what 1F1B does, and more.
        cap_bytes=held * random.choice([random.uniform(1, num_ranks), *[random.uniform(num_ranks, 2 * num_ranks)] * 2]),
    )


def _layer(random: Random) -> StageCost:
    forward_s = random.choice([0.5, 1.0, 1.5, 3.0])
    return StageCost(
        forward_s=forward_s,
        input_s=forward_s * random.choice([1.0, 1.5]),
        weight_s=forward_s * random.choice([0.0, 0.5, 1.0]),
        activation_bytes=random.choice([1.0, 2.0]),
        weight_saved_bytes=random.choice([0.0, 0.5]),
        output_bytes=1.0,
        reduce_s=random.choice([0.0, 0.0, 1.0]),
    )


def _link(random: Random) -> LinkCost:
    transfer_s = random.choice([0.25, 1.0, 3.0, 8.0])
    pair_bps = random.choice([float("inf"), 8 / (1.5 * transfer_s)])
    return LinkCost(latency_s=random.choice([0.0, 1.0, 5.0]), bandwidth_bps=8 / transfer_s, pair_bps=pair_bps)


def compare(cluster: Cluster, search_s: float = 0.0) -> Outcome:
    """Schedule every fixed kind on every placement that it supports, and `auto` over all placements."""
    fixed_s, fixed = float("inf"), ""
    own: dict[str, tuple[float, str]] = {}
    candidates = placements(cluster.num_ranks, cluster.sites)
    for kind, name, placement in _goes_with(candidates):
        step_s = fixed_step_s(cluster, kind, placement)
        own[name] = min(own.get(name, (float("inf"), "")), (step_s, f"{kind} on {name}"))
        if step_s < fixed_s:
            fixed_s, fixed = step_s, f"{kind} on {name}"
    chosen = choose(
        candidates,
        lambda placement: cluster.layers.cut(placement.num_stages),
        cluster.num_microbatches,
        memory_cap_bytes=cluster.cap_bytes,
        search_seconds=search_s,
    )
    for option in chosen.options:
        validate(option.schedule, costs=option.costs, memory_cap_bytes=cluster.cap_bytes)
    slower = tuple(
        f"{own[option.name][1]} {own[option.name][0]:g} s, auto {option.step_s:g} s"
        for option in chosen.options
        if option.name in own and option.step_s > own[option.name][0] * ROUNDING
    )
    return Outcome(cluster=cluster, fixed=fixed, fixed_s=fixed_s, auto=chosen.best, slower=slower)


def _goes_with(candidates: dict[str, Placement]) -> Iterator[tuple[str, str, Placement]]:
    for kind, spec in generators().items():
        if not spec.looks_at_costs:
            yield from ((kind, name, placement) for name, placement in candidates.items())


def fixed_step_s(cluster: Cluster, kind: str, placement: Placement) -> float:
    """Return the step of a fixed kind as an engine runs it, or infinity if no such schedule keeps the cap."""
    costs = cluster.layers.cut(placement.num_stages)
    try:
        schedule = as_run(generate(kind, placement, cluster.num_microbatches), costs)
    except ValueError:
        return float("inf")
    if peak_bytes(schedule, costs) > cluster.cap_bytes * ROUNDING:
        return float("inf")
    return simulate(add_relays(lower(side_by_side(schedule, 1)), costs), costs).step_s


def _rows(outcomes: Sequence[Outcome]) -> Iterator[dict[str, object]]:
    for sites in (*sorted({len(o.cluster.sites) for o in outcomes}), 0):
        some = [o for o in outcomes if sites in (0, len(o.cluster.sites))]
        ratios = [o.auto.step_s / o.fixed_s for o in some if o.fixed]
        yield {
            "sites": str(sites or "all"),
            "clusters": str(len(some)),
            "auto faster": str(sum(ratio < 1 / ROUNDING for ratio in ratios)),
            "equal": str(sum(1 / ROUNDING <= ratio <= ROUNDING for ratio in ratios)),
            "slower": str(sum(ratio > ROUNDING for ratio in ratios)),
            "no fixed schedule fits the cap": str(len(some) - len(ratios)),
            "mean ratio": f"{mean(ratios):.3f}" if ratios else "-",
            "best": f"{min(ratios):.3f}" if ratios else "-",
        }


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{name} {times}" for name, times in Counter(names).most_common())
