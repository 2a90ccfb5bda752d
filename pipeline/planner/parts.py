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
    """A part of the space in the queue of the search, which may still be divided.

    Attributes:
        expected: score that orders the search.
        bound: lower bound of the scores of the part.
        shape: the shape; if ``family`` is set, any shape of the family, with any of its numbers of stages.
        route: the first sites of the part's layouts.
        crowding: ratio of ``expected`` to ``bound``; None if unknown.
        cuts: the remaining cuts of a whole route, or None before its first cuts are placed.
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
    """A candidate in the queue of layouts to schedule.

    Attributes:
        expected: score that orders the queue.
        number: unique number, which breaks ties.
        bound: lower bound of the candidate's score.
    """

    expected: float
    number: int
    candidate: Candidate
    bound: float


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        predictions: scheduled layouts.
        left_out: least bound of the parts that were not examined.
        spare: candidates that were not scheduled, with their bounds.
    """

    predictions: list[Prediction]
    left_out: float
    spare: list[tuple[float, Candidate]]


_SHAPE = tuple(field.name for field in fields(Shape))


def place_of(layout: Layout) -> tuple[Shape, Route]:
    """Return the shape and the route of a layout."""
    return Shape(**{name: getattr(layout, name) for name in _SHAPE}), Route(layout.sites, layout.stages)
