"""Random scheduling cases, and the distance of `auto` from their proven optimum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.pipeline.generators.optimum import Optimum, solve
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate


@dataclass(frozen=True, kw_only=True)
class SchedulingCase:
    """A scheduling problem with integer seconds and bytes, so that the solver is exact."""

    name: str
    placement: Placement
    num_microbatches: int
    costs: CostModel
    cap_bytes: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of `auto` and the solver for a case."""

    case: SchedulingCase
    auto_s: float
    optimum: Optimum

    @property
    def gap(self) -> float:
        """Step of `auto` over the best proven lower bound, minus 1."""
        return self.auto_s / self.optimum.bound_s - 1


def closed_cases(count: int, limit_s: float, search_s: float) -> Iterator[Result]:
    """Yield results of the first ``count`` random cases for which the solver proves the optimum."""
    seed = found = 0
    while found < count:
        result = solve_both(random_case(seed), limit_s, search_s)
        if result.optimum.proven:
            found += 1
            yield result
        seed += 1


def solve_both(case: SchedulingCase, limit_s: float, search_s: float) -> Result:
    """Schedule a case with `auto`, then with the solver."""
    schedule = generate_auto(case.placement, case.num_microbatches, case.costs, case.cap_bytes, search_s)
    timeline = simulate(schedule, case.costs)
    optimum = solve(case.placement, case.num_microbatches, case.costs, case.cap_bytes, limit_s=limit_s, known=schedule)
    makespan_s = max(lane[-1].end_s for lane in timeline.compute)
    assert makespan_s >= optimum.bound_s - 1e-6, f"{case.name}: auto takes {makespan_s}, less than {optimum}"
    return Result(case=case, auto_s=makespan_s, optimum=optimum)


def random_case(seed: int) -> SchedulingCase:
    """Return 2-6 ranks in 1-3 sites, 1-12 micro-batches, uneven stages and links, and a feasible cap."""
    random = Random(seed)
    num_ranks = random.randint(2, 6)
    sites = _sites(random, num_ranks)
    layout, placement = random.choice(
        [
            ("straight", Placement.straight(num_ranks, sites)),
            ("interleaved", Placement.interleaved(num_ranks, 2, sites)),
            ("fold", Placement.fold(num_ranks, sites=sites)),
            ("site fold", Placement.site_fold(sites)),
        ]
    )
    num_microbatches = random.randint(1, min(12, max(1, 60 // placement.num_stages)))
    stages = tuple(_stage(random) for _ in range(placement.num_stages))
    local = LinkCost(latency_s=random.randint(0, 1), bandwidth_bps=random.choice([8.0, float("inf")]))
    wan = LinkCost(latency_s=random.randint(0, 8), bandwidth_bps=8 / random.randint(1, 8))
    costs = CostModel(stages=stages, local=local, wan=wan)
    held = max(sum(stages[stage].activation_bytes for stage in of_rank) for of_rank in placement.rank_stages)
    cap_bytes = float(int(held * random.uniform(1.0, 1.2 * min(num_ranks, num_microbatches) + 0.3)))
    return SchedulingCase(
        name=f"{seed}: {layout} {'+'.join(map(str, sites))}",
        placement=placement,
        num_microbatches=num_microbatches,
        costs=costs,
        cap_bytes=cap_bytes,
    )


def _sites(random: Random, num_ranks: int) -> tuple[int, ...]:
    cuts = sorted(random.sample(range(1, num_ranks), random.randint(0, min(2, num_ranks - 1))))
    return tuple(end - start for start, end in zip([0, *cuts], [*cuts, num_ranks], strict=True))


def _stage(random: Random) -> StageCost:
    forward_s, saved = random.randint(2, 6), random.randint(2, 5)
    return StageCost(
        forward_s=forward_s,
        input_s=forward_s + random.randint(-1, 2),
        weight_s=max(1, forward_s + random.randint(-2, 1)),
        activation_bytes=saved,
        weight_saved_bytes=random.choice([0, saved // 2]),
        output_bytes=1,
    )
