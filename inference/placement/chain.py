"""A chunk's way through the stages of a pipeline: one bubble of each stage's rank, in order.

A chunk cannot be cut again on its way, so it waits at each stage for the first bubble that is long enough for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

HOP_S = 0.001
"""Seconds between the end of a stage and the begin of the next one."""
Seconds = Callable[[int, float], float]
"""Predicted seconds of a stage, by number of tokens and the time at which it begins to compute them."""


class Stage(NamedTuple):
    """A stage of the pipeline.

    Attributes:
        bubbles: when its rank is idle, less the guard: (start, end) in order.
        free_s: when it has computed all earlier chunks.
        seconds: the time that it takes.
    """

    bubbles: Sequence[tuple[float, float]]
    free_s: float
    seconds: Seconds


def spans_of(stages: Sequence[Stage], tokens: int, at_s: float, hop_s: float) -> list[tuple[float, float]] | None:
    """Return when each stage computes a chunk that arrives at ``at_s``: (start, end); or None if a stage has no bubble.

    Args:
        tokens: length of the chunk.
        hop_s: time from the end of a stage to the arrival at the next one.
    """
    spans: list[tuple[float, float]] = []
    for stage in stages:
        at_s = max(at_s, stage.free_s)
        for start_s, end_s in stage.bubbles:
            begin_s = max(start_s, at_s)
            if begin_s < end_s and (done_s := begin_s + stage.seconds(tokens, begin_s)) <= end_s:
                spans.append((begin_s, done_s))
                at_s = done_s + hop_s
                break
        else:
            return None
    return spans


def most_tokens(stages: Sequence[Stage], wanted: int, at_s: float, hop_s: float) -> int:
    """Return the most tokens, up to ``wanted``, of a chunk that fits into a bubble of each stage, or 0.

    Fewer tokens arrive everywhere no later, and fit into the same bubbles. So the result is found by bisection.
    """
    fits, too_many = 0, wanted + 1
    if wanted > 0 and spans_of(stages, wanted, at_s, hop_s) is not None:
        return wanted
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if spans_of(stages, middle, at_s, hop_s) is not None:
            fits = middle
        else:
            too_many = middle
    return fits
