"""Numbers of layers of stages with which ranks take about equally long, by measured costs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.placement import Placement

_SECONDS = ("forward_s", "input_s", "weight_s", "step_s")


def largest(costs: Sequence[CostModel]) -> CostModel:
    """Return costs with the longest seconds of each stage, of costs of replicas."""
    stages = [
        replace(each[0], **{name: max(getattr(stage, name) for stage in each) for name in (*_SECONDS, "jitter")})
        for each in zip(*(one.stages for one in costs), strict=True)
    ]
    return replace(costs[0], stages=tuple(stages))


def with_layers(costs: CostModel, layers: Sequence[int], fixed: Sequence[float], *, moved: Sequence[int]) -> CostModel:
    """Return the costs of stages with ``moved`` instead of ``layers`` layers.

    Args:
        fixed: share of each stage's time that an embedding or a head takes.
    """
    shares = zip(costs.stages, fixed, moved, layers, strict=True)
    return replace(
        costs, stages=tuple(_scaled(stage, share + (1.0 - share) * new / old) for stage, share, new, old in shares)
    )


def _scaled(stage: StageCost, ratio: float) -> StageCost:
    names = (*_SECONDS, "activation_bytes", "weight_saved_bytes")
    return replace(stage, **{name: getattr(stage, name) * ratio for name in names})


def balanced_layers(
    costs: CostModel,
    layers: tuple[int, ...],
    fixed: Sequence[float],
    placement: Placement,
    *,
    fits: Callable[[tuple[int, ...]], bool] = lambda counts: True,
) -> tuple[int, ...]:
    """Return numbers of layers of the stages with which the busiest rank computes for less time.

    Single layers move from the busiest rank to the one that then computes for the shortest time, while that helps.

    Args:
        fixed: see `with_layers`.
        fits: returns whether ranks have memory for these numbers.
    """
    counts = layers
    shares = zip(costs.stages, fixed, layers, strict=True)
    parts = [(stage.compute_s * share, stage.compute_s * (1.0 - share) / count) for stage, share, count in shares]
    while True:
        busy = [
            sum(parts[stage][0] + counts[stage] * parts[stage][1] for stage in held) for held in placement.rank_stages
        ]
        busiest = busy.index(max(busy))
        moves = sorted(
            (busy[placement.stage_ranks[to]] + parts[to][1], counts[to], to, -counts[source], source)
            for source in placement.rank_stages[busiest]
            for to in range(placement.num_stages)
            if counts[source] > 1 and placement.stage_ranks[to] != busiest
        )
        shorter = (_with_move(counts, source, to) for seconds, _, to, _, source in moves if seconds < busy[busiest])
        found = next(filter(fits, shorter), None)
        if found is None:
            return counts
        counts = found


def _with_move(counts: Sequence[int], source: int, to: int) -> tuple[int, ...]:
    return tuple(count - (stage == source) + (stage == to) for stage, count in enumerate(counts))
