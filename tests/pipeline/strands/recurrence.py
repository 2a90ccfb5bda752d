"""DHelix's pairing of operators by dynamic programming, with a barrier after each pair (section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.plan import SegmentPlan, Step
from weft.pipeline.strands.segments import Kind, LinkScope, Strand, StrandPair

_Place = tuple[int, int]
"""Operators of the forward and of the backward that are done."""


@dataclass(frozen=True)
class Operator:
    """An operator of the paper: compute, or a collective with the weight gradients of its strand that overlap it."""

    compute_s: float = 0.0
    comm_s: float = 0.0
    kind: Kind = Kind.gemm
    link: LinkScope | None = None
    begins: bool = False
    """True if a segment's compute is in it."""
    weights: int = 0
    """Number of weight gradients in it."""


@dataclass(frozen=True)
class Pairing:
    """The best pairing of operators by the recurrence.

    Attributes:
        seconds: the paper's T_opt(N_f, N_b).
        plan: the same order of steps, without the barriers.
        together: the operators between successive barriers.
    """

    seconds: float
    plan: SegmentPlan
    together: tuple[tuple[Operator, ...], ...]


def pair_operators(pair: StrandPair, table: OverlapTable) -> Pairing:
    """Return the best pairing of both strands' operators in their given order.

    Weight gradients stay in place. One that can overlap with its own strand's collective forms one operator
    with it, as in the paper's figure 10.
    """
    forward, backward = _operators(pair.forward, pair, weights=False), _operators(pair.backward, pair, weights=True)
    best: dict[_Place, tuple[float, _Place]] = {(0, 0): (0.0, (0, 0))}
    for i, j in product(range(len(forward) + 1), range(len(backward) + 1)):
        options = []
        if i:  # T(i-1, j) + P(i, nothing)
            options.append((best[i - 1, j][0] + _together([forward[i - 1]], table), (i - 1, j)))
        if j:  # T(i, j-1) + P(nothing, j)
            options.append((best[i, j - 1][0] + _together([backward[j - 1]], table), (i, j - 1)))
        if i and j:  # T(i-1, j-1) + P(i, j)
            both = _together([forward[i - 1], backward[j - 1]], table)
            options.append((best[i - 1, j - 1][0] + both, (i - 1, j - 1)))
        if options:
            best[i, j] = min(options)
    path = _path(best, len(forward), len(backward))
    together = tuple((*backward[before_j:j], *forward[before_i:i]) for (i, j), (before_i, before_j) in path)
    plan = SegmentPlan(tuple(_order(path, forward, backward)))
    return Pairing(best[len(forward), len(backward)][0], plan, together)


def _operators(strand: Strand, pair: StrandPair, *, weights: bool) -> list[Operator]:
    found = []
    for index, segment in enumerate(strand.segments):
        found.append(Operator(segment.compute_s, kind=segment.kind, begins=True))
        beside = [weight.compute_s for weight in pair.weights if weights and weight.after == index]
        if segment.link is not None or beside:
            found.append(Operator(sum(beside), segment.comm_s, Kind.gemm, segment.link, weights=len(beside)))
    return found


def _together(operators: list[Operator], table: OverlapTable) -> float:
    """Return P, the seconds of concurrent operators; those that need the same resource run one after the other."""
    compute_s = sum(operator.compute_s for operator in operators)
    kind = next((operator.kind for operator in operators if operator.compute_s), None)
    busy_s: dict[LinkScope, float] = {}
    for operator in operators:
        if operator.link is not None and operator.comm_s:
            busy_s[operator.link] = busy_s.get(operator.link, 0.0) + operator.comm_s
    seconds = 0.0
    while compute_s > 0 or busy_s:
        running = [left for left in (compute_s, *busy_s.values()) if left > 0]
        first_s = min(running)
        seconds += first_s * table.slowdown(kind if compute_s > 0 else None, tuple(busy_s))
        compute_s = compute_s - first_s if compute_s > first_s else 0.0
        busy_s = {link: left - first_s for link, left in busy_s.items() if left > first_s}
    return seconds


def _path(best: dict[_Place, tuple[float, _Place]], i: int, j: int) -> list[tuple[_Place, _Place]]:
    """Return the steps of the best pairing through the table, each with the entry before it."""
    at, path = (i, j), []
    while at != (0, 0):
        path.append((at, best[at][1]))
        at = best[at][1]
    return path[::-1]


def _order(path: list[tuple[_Place, _Place]], forward: list[Operator], backward: list[Operator]) -> list[Step]:
    """Return the steps of a pairing, pair by pair; segments come first, so that their collectives start early."""
    steps = []
    for (i, j), (before_i, before_j) in path:
        if j > before_j and backward[before_j].begins:
            steps.append(Step.backward)
        if i > before_i and forward[before_i].begins:
            steps.append(Step.forward)
        if j > before_j:
            steps += [Step.weight] * backward[before_j].weights
    return steps
