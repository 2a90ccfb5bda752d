"""A cheap lower bound on the makespan: the busiest rank or link, and the path of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.pipeline.action import Op
from weft.pipeline.generators.auto_problem import KINDS, NONE, Problem


def lower_bound_s(problem: Problem) -> float:
    """Return the larger of two bounds: one micro-batch's path, and any rank's or link's head + work + tail.

    The head is the time before a rank or link can start, the tail the time that must follow its
    work. The bound ignores the memory cap, and scales all work as if it ran in strand pairs.
    """
    forward_s, backward_s, end_s = lone_microbatch(problem)
    stages = range(problem.placement.num_stages)
    weight_s = _seconds(problem, Op.W, 0)
    bounds = [end_s + weight_s]
    for held in problem.placement.rank_stages:
        weights_s = sum(_seconds(problem, Op.W, stage) for stage in held) * problem.num_microbatches
        through_s = sum(_seconds(problem, op, s) for s in held for op in (Op.F, Op.I)) * problem.num_microbatches
        first, last = forward_s[held[0]], backward_s[held[0]] + _seconds(problem, Op.I, held[0])
        tail_s = max(end_s - last, 0.0) + weight_s
        bounds.append(first + through_s + weights_s)
        bounds.append(first + through_s + tail_s)
    links: dict[int, list[tuple[float, float, float]]] = {}
    for stage in stages:
        for op, starts_s in ((Op.F, forward_s), (Op.I, backward_s)):
            node = _first(problem, op, stage)
            made_s = starts_s[stage] + problem.seconds[node]
            for link, held_s in _links_held(problem, node):
                links.setdefault(link, []).append((made_s, held_s, end_s - made_s - held_s))
    for transfers in links.values():
        bounds.append(sending_bound_s(transfers, problem.num_microbatches) + weight_s)
    return max(bounds) * problem.least_pair_scale


def sending_bound_s(transfers: Sequence[tuple[float, float, float]], count: int) -> float:
    """Return the seconds until all micro-batches have crossed one link and ended.

    The transfers of a micro-batch are jobs with heads and tails on one machine. For every choice of a head and a tail,
    the transfers with at least this head and at least this tail must fit between them. The bound is the largest sum.

    Args:
        transfers: for each transfer of a micro-batch over the link, its head, its seconds on the link and its tail.
        count: number of micro-batches.
    """
    bound_s = 0.0
    for head_s, _, _ in transfers:
        for _, _, tail_s in transfers:
            if held := [one for ahead_s, one, left_s in transfers if ahead_s >= head_s and left_s >= tail_s]:
                bound_s = max(bound_s, head_s + count * sum(held) + tail_s)
    return bound_s


def lone_microbatch(problem: Problem) -> tuple[list[float], list[float], float]:
    """Return when a micro-batch that runs alone starts each stage's forward and input gradient, and when it ends."""
    now_s, starts_s = 0.0, {}
    stages = range(problem.placement.single.num_stages)
    for op, order in ((Op.F, stages), (Op.I, reversed(stages))):
        for stage in order:
            node = _first(problem, op, stage)
            starts_s[op, stage] = now_s
            now_s += problem.seconds[node] + problem.transit_s[node] + problem.latency_s[node]
    pipelines = problem.placement.pipelines  # they are identical
    return [starts_s[Op.F, s] for s in stages] * pipelines, [starts_s[Op.I, s] for s in stages] * pipelines, now_s


def pace_s(problem: Problem) -> float:
    """Return the seconds per micro-batch of the busiest rank or link: the best steady-state rate."""
    busy_s = [0.0] * (problem.num_ranks + problem.num_links)
    for stage, rank in enumerate(problem.placement.stage_ranks):
        for op in (Op.F, Op.I, Op.W):
            node = _first(problem, op, stage)
            busy_s[rank] += problem.seconds[node]
            for link, held_s in _links_held(problem, node):
                busy_s[problem.num_ranks + link] += held_s
    return max(busy_s)


def _links_held(problem: Problem, node: int) -> Iterator[tuple[int, float]]:
    """Yield the links that a node's transfer occupies, with the seconds on each link."""
    if problem.link[node] != NONE:
        yield problem.link[node], problem.occupancy_s[node]
    if problem.pair_link[node] != NONE:
        yield problem.pair_link[node], problem.transit_s[node]


def _first(problem: Problem, op: Op, stage: int) -> int:
    """Return the node of micro-batch 0 for this operation and stage."""
    return (len(KINDS) * stage + KINDS.index(op)) * problem.num_microbatches


def _seconds(problem: Problem, op: Op, stage: int) -> float:
    return problem.seconds[_first(problem, op, stage)]
