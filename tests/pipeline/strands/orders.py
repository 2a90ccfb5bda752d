"""Segment plans of other systems: one strand after the other, and round robin."""

from __future__ import annotations

from collections.abc import Iterable

from weft.pipeline.strands.plan import SegmentPlan, Step
from weft.pipeline.strands.segments import StrandPair


def backward_then_forward(pair: StrandPair) -> SegmentPlan:
    """Return the plan without interleaving: only weight gradients overlap with their own strand's collectives."""
    return in_place(pair, [Step.backward] * len(pair.backward.segments) + [Step.forward] * len(pair.forward.segments))


def round_robin(pair: StrandPair) -> SegmentPlan:
    """Alternate segments of both strands, as Wavelet interleaves micro-batches (DHelix's baseline Wavelet+)."""
    turns = max(len(pair.forward.segments), len(pair.backward.segments))
    order = [step for _ in range(turns) for step in (Step.backward, Step.forward)]
    left = {Step.backward: len(pair.backward.segments), Step.forward: len(pair.forward.segments)}
    steps = []
    for step in order:
        if left[step]:
            left[step] -= 1
            steps.append(step)
    return in_place(pair, steps)


def in_place(pair: StrandPair, segments: Iterable[Step]) -> SegmentPlan:
    """Return the plan with each weight gradient directly after the segment that makes it possible."""
    steps, backward, weights = [], 0, 0
    for step in segments:
        steps.append(step)
        backward += step is Step.backward
        while weights < pair.available(backward):
            steps.append(Step.weight)
            weights += 1
    return SegmentPlan(tuple(steps))
