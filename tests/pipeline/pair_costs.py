"""Durations of strand pairs without strands, for schedules and simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.pipeline.costs import StageCost


@dataclass(frozen=True)
class ScaledPairs:
    """Pairs that take a share of their halves. The forward begins half of its work before the backward frees any."""

    factor: float

    def scale(self, forward: int, backward: int, *, weights: bool = True) -> float:
        return self.factor

    def held(self, forward: int, backward: int, saved_bytes: float, freed_bytes: float) -> float:
        return max(saved_bytes / 2, saved_bytes - freed_bytes)

    def for_cell(self, pipelines: int) -> ScaledPairs:
        return self

    def joined(self, bounds: list[int]) -> ScaledPairs:
        return self

    def divided(self, parts: int) -> ScaledPairs:
        return self

    def timed(self, stages: Sequence[StageCost]) -> tuple[StageCost, ...]:
        return tuple(stages)


def scaled(factor: float) -> ScaledPairs | None:
    """Return pairs that take a share of their halves, or None where that is all."""
    return None if factor == 1 else ScaledPairs(factor)
