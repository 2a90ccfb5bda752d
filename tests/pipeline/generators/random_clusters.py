"""Random clusters of 1 to 4 sites, and `auto` compared with every fixed schedule on every placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.choice import Option, choose, placements
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate, generators
from weft.pipeline.lowering import as_run, lower
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.segments import Kind, LinkScope, Segment, StageStrands, Strand, StrandPair, WeightGradient
from weft.pipeline.validation import validate

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
