"""The search for a segment plan: the order of two strands' segments, and the positions of weight gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.plan import SegmentPlan, Step, take, turned
from weft.pipeline.strands.segments import StageStrands, StrandPair
from weft.pipeline.strands.state import IDLE, PairState, Transfer

WIDTH = 12
"""States kept for each number of segments done: beyond some layers more change nothing."""

_At = tuple[int, int, int]
"""Segments of the forward, segments of the backward and weight gradients that are done."""


@dataclass(frozen=True, eq=False)
class _Label:
    """A partial plan: its state, the strand that runs, its last step, and the partial plan before that step."""

    state: PairState
    turn: Step | None = None
    step: Step | None = None
    before: _Label | None = None


def search(
    pair: StrandPair, table: OverlapTable, *, handover_s: float = 0.0, width: int = WIDTH, band: float = 1.0
) -> SegmentPlan:
    """Return the best plan, by dynamic programming over (F done, B done, W done).

    Partial plans with the same counts compete. One is dropped if another is no later and has no more left of either
    collective. A partial plan that is ahead can always wait, so both are compared at the later one's time, less a
    switch if the strands that run differ. Beyond the paper: weight gradients move, collectives need no barrier,
    collectives of two link classes overlap, and switching strands takes time.

    Args:
        handover_s: seconds of a switch between strands.
        width: partial plans kept for the same counts.
        band: maximum distance of the strands, as a share of their length; 1 searches everything.
    """
    return _plan(_ways(pair, table, handover_s, width, band))


def search_stages(
    forward: StageStrands, backward: StageStrands, table: OverlapTable, handover_s: float = 0.0
) -> SegmentPlan:
    """Plan the forward of one stage concurrently with the backward of another.

    Up to `_SEARCHED` layers are searched directly. A longer plan begins and ends like the plan for
    `_SEARCHED` layers, and repeats a period of its middle. In a period both strands advance by
    the same number of layers, so their distance stays the same.
    """
    whole = forward.beside(backward)
    layer, layers = _alike(forward, backward)
    for searched in range(_SEARCHED, _SEARCHED - 2, -1) if layers > _SEARCHED else ():
        missing = layers - searched
        shorter = forward.without(layer, missing).beside(backward.without(layer, missing))
        plan = search(shorter, table, handover_s=handover_s, band=_BAND / searched)
        if (found := _period(plan, layer, missing)) is not None:
            start, stop, times = found
            longer = SegmentPlan((*plan.steps[:stop], *plan.steps[start:stop] * times, *plan.steps[stop:]))
            longer.check(whole)
            return longer
    most = max(forward.layers, backward.layers)
    return search(whole, table, handover_s=handover_s, band=1.0 if most <= 2 else _BAND / most)


_SEARCHED = 6
_BAND = 1.5
"""Maximum distance of the strands in layers, in plans of more than two layers."""


def _alike(forward: StageStrands, backward: StageStrands) -> tuple[StrandPair, int]:
    """Return the layer with the longest run of repetitions in both stages, and the number of repetitions."""
    counts = dict(backward.runs)
    runs = [(min(count, counts.get(layer, 0)), layer) for layer, count in forward.runs]
    count, layer = max(runs, key=lambda run: run[0])
    return layer, count


def _period(plan: SegmentPlan, layer: StrandPair, missing: int) -> tuple[int, int, int] | None:
    """Return the period in the middle of a plan, or None if there is none.

    The values are the first step, the step after the last, and how often the period has to be added.
    """
    one, two = layer, layer.repeated(2)
    per_layer = [
        len(of(two)) - len(of(one))
        for of in (lambda p: p.forward.segments, lambda p: p.backward.segments, lambda p: p.weights)
    ]
    done, at = [(0, 0, 0)], [0, 0, 0]
    for step in plan.steps:
        at[(Step.forward, Step.backward, Step.weight).index(step)] += 1
        done.append((at[0], at[1], at[2]))
    where = {place: number for number, place in enumerate(done)}
    middle = len(done) / 2
    found = []
    for period in (1, 2):
        for number, (forward, backward, weights) in enumerate(done if missing % period == 0 else ()):
            later = forward + period * per_layer[0], backward + period * per_layer[1], weights + period * per_layer[2]
            if later in where:
                found.append((abs((number + where[later]) / 2 - middle), number, where[later], missing // period))
    return min(found)[1:] if found else None


def _ways(pair: StrandPair, table: OverlapTable, handover_s: float, width: int, band: float) -> _Label:
    ends = len(pair.forward.segments), len(pair.backward.segments), len(pair.weights)
    places: dict[_At, list[_Label]] = {(0, 0, 0): [_Label(PairState())]}
    # Every step advances one number, so places are visited by how many steps lead to them.
    for _ in range(sum(ends)):
        onward: dict[_At, list[_Label]] = {}
        for at, labels in places.items():
            for step, place in _steps(at, ends, pair, band):
                index = at[(Step.forward, Step.backward, Step.weight).index(step)]
                kept = onward.setdefault(place, [])
                for label in labels:
                    state, turn = turned(label.state, label.turn, step, table, handover_s)
                    _keep(kept, _Label(take(state, pair, step, index, table), turn, step, label), handover_s, width)
        places = onward
    return min(places[ends], key=lambda label: label.state.ended(table).now_s)


def _steps(at: _At, ends: _At, pair: StrandPair, band: float) -> Iterator[tuple[Step, _At]]:
    """Yield the possible next steps, each with the counts of steps done after it."""
    forward, backward, weights = at
    if weights < pair.available(backward):
        yield Step.weight, (forward, backward, weights + 1)
    ahead = forward / max(ends[0], 1) - backward / max(ends[1], 1)
    if forward < ends[0] and (ahead <= band or backward == ends[1]):
        yield Step.forward, (forward + 1, backward, weights)
    if backward < ends[1] and (-ahead <= band or forward == ends[0]):
        behind = pair.available(backward) - weights
        if behind <= band * max(ends[2], 1) + 1:
            yield Step.backward, (forward, backward + 1, weights)


def _keep(kept: list[_Label], label: _Label, handover_s: float, width: int) -> None:
    """Add a partial plan unless a kept one is as good; drop those that it beats, and the worst beyond ``width``."""
    if any(_as_good(other, label, handover_s) for other in kept):
        return
    kept[:] = [other for other in kept if not _as_good(label, other, handover_s)]
    kept.append(label)
    if len(kept) > width:
        kept.remove(max(kept, key=lambda other: _promise(other.state)))


def _promise(state: PairState) -> float:
    return 2 * state.now_s + state.forward.left_s + state.backward.left_s


def _as_good(label: _Label, than: _Label, handover_s: float) -> bool:
    """Return True if continuing from ``label`` loses nothing compared with continuing from ``than``."""
    state, other = label.state, than.state
    gained_s = other.now_s - state.now_s - (handover_s if label.turn is not than.turn else 0.0)
    if gained_s < 0:
        return False
    return _left(state.forward, state.backward, gained_s) <= _left(other.forward, other.backward, 0.0) and _left(
        state.backward, state.forward, gained_s
    ) <= _left(other.backward, other.forward, 0.0)


def _left(transfer: Transfer, other: Transfer, gained_s: float) -> float:
    """Return the seconds until a collective ends if nothing slows it down, counted from ``gained_s`` later."""
    queue_s = other.left_s if transfer.second else 0.0
    return max(0.0, transfer.left_s + queue_s - gained_s) if transfer is not IDLE else 0.0


def _plan(label: _Label) -> SegmentPlan:
    steps: list[Step] = []
    at: _Label | None = label
    while at is not None and at.step is not None:
        steps.append(at.step)
        at = at.before
    return SegmentPlan(tuple(reversed(steps)))
