"""The parts of the space that a search has not expanded yet, and its results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

from weft.pipeline.planner.bounds import ANYWHERE
from weft.pipeline.planner.candidates import Candidate
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.space import Family


class Opened(NamedTuple):
    """A part of the space that is still to be looked at.

    Attributes:
        expected: score that orders the search; ``bound`` is a lower bound of the score.
        shape: of a family, with any of its numbers of stages, or all but its route.
        crowding: ratio of ``expected`` to ``bound``; None if unknown.
        cuts: further cuts of a whole route.
    """

    expected: float
    bound: float
    depth: int
    number: int
    shape: Shape
    family: Family | None = None
    route: Route = ANYWHERE
    crowding: float | None = None
    cuts: Iterator[tuple[int, ...]] | None = None


class Placed(NamedTuple):
    """A whole layout that is still to be scheduled."""

    expected: float
    number: int
    candidate: Candidate
    bound: float


class Found(NamedTuple):
    """The result of a search: predictions, the least bound of the parts left out, and whole layouts by their bounds."""

    predictions: list[Prediction]
    left_out: float
    spare: list[tuple[float, Candidate]]


_SHAPE = tuple(field.name for field in fields(Shape))


def place_of(layout: Layout) -> tuple[Shape, Route]:
    """All of a layout but its cut, its schedule and its DP-cells."""
    return Shape(**{name: getattr(layout, name) for name in _SHAPE}), Route(layout.sites, layout.stages)
