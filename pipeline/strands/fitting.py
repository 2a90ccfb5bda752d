"""Fit the overlap of operators to measured strand pairs, so that the next run plans with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from weft.conf.host.measurements import spread_of
from weft.pipeline.action import Op
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.timeline import Timeline

Kinds = tuple[tuple[bool, Op, int], ...]
"""The actions of a slot, a forward first, without their micro-batches."""
_HALVINGS = 20


def fit_overlap(timelines: Sequence[Timeline], pairs: StrandCosts) -> tuple[OverlapTable, float] | None:
    """Return the overlap of operators that reproduces measured strand pairs, and their speed relative to predictions.

    All factors are moved by the same share towards 0 or 1. A pair counts if its halves ran alone elsewhere in the
    steps, so that the speed of the device plays no part. None if no pair counts.

    Args:
        pairs: the costs with which the steps were planned.
    """
    seconds: dict[Kinds, list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            kinds = tuple(sorted((action.op is not Op.F, action.op, action.stage) for action in span.slot))
            seconds[kinds].append(span.end_s - span.start_s)
    alone = {kinds[0]: median(values) for kinds, values in seconds.items() if len(kinds) == 1}
    measured = {
        (kinds[0][-1], kinds[1][-1], kinds[1][1] is Op.B): median(values) / (alone[kinds[0]] + alone[kinds[1]])
        for kinds, values in seconds.items()
        if len(kinds) == 2 and alone.keys() >= {*kinds}
    }
    if not measured:
        return None

    def faster(share: float) -> list[float]:
        table = pairs.overlap.moved(share)
        return [pairs.scale_under(table, *pair) / scale for pair, scale in measured.items()]

    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if median(faster(middle)) > 1 else (low, middle)
    ratios = faster(0.0)
    return replace(pairs.overlap.moved(low), spread=spread_of(ratios, median(ratios))), median(ratios)
