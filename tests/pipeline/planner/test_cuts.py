"""Tables of cuts bound every cut, also where the memory of the fullest rank binds all of them."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.planner.planned import cluster, model, site, sums
from weft.pipeline.planner.cut_table import CutTable
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import LEGS, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.shapes import shapes
from weft.pipeline.planner.space import Space

SHAPE = Shape(num_stages=4, replicas=1, microbatches=16, zero_stage=0)
LAYERS = 10
UNEVEN = [500, 300, 300, 500, 300, 400, 300, 500, 300, 400]
"""Millions of weights, of layers that differ."""


def scarce(memory_share, *, gpus=("A100", "A100"), is_even=True, messages=0.0):
    """An evaluation on two sites of two GPUs, whose memory is filled by so much."""
    sites = (site(f"s{number}", hosts=1, gpus_per_host=2, gpu=gpu) for number, gpu in enumerate(gpus))
    work = model(layers=LAYERS, parameters=400_000_000, tokens=16384, width=8192)
    if not is_even:
        layers = zip(work.layers, UNEVEN, strict=True)
        work = replace(
            work,
            layers=tuple(
                replace(layer, parameters=number * 10**6, trained_parameters=None) for layer, number in layers
            ),
        )
    work = replace(work, message_bytes=messages or work.message_bytes)
    return Evaluation(cluster(*sites, bandwidth_bps=1e11), work, Request(sequences=16, max_memory=memory_share))


@pytest.mark.parametrize("gpus", [("A100", "A100"), ("A40", "H100"), ("A40", "H200")])
@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("memory_share", [0.5, 0.6, 0.75])
@pytest.mark.parametrize("route", [Route((0, 1), (2, 2)), Route((1, 0), (2, 2))])
def test_no_cut_takes_less_than_its_table_says_and_every_cut_is_in_one(memory_share, gpus, is_even, route):
    evaluation = scarce(memory_share, gpus=gpus, is_even=is_even)
    tables = evaluation.tables(SHAPE, route)
    bounds = {}
    for bound, table in tables:
        for cut in table.below(inf):
            bounds[cut] = min(bound, bounds.get(cut, inf))
    fitting = list(evaluation.candidates(SHAPE, route, sums(LAYERS, 4)))
    for candidate in fitting:  # under both schedules
        assert bounds[candidate.layout.layers] <= candidate.score_bound * (1 + 1e-9)
    assert fitting or not is_even or not tables


def test_cuts_are_bounded_by_levels_of_memory_only_where_it_binds():
    found, alone = (scarce(share, gpus=("A40", "H100")).tables(SHAPE, Route((1, 0), (2, 2))) for share in (0.75, 9.0))
    bounds = [bound for bound, _ in found]
    assert len(bounds) > 1 and bounds == sorted(bounds) and len(alone) == 1


@pytest.mark.parametrize("arrangement", LEGS)
def test_a_placement_that_fits_nowhere_has_no_cuts(arrangement):
    evaluation = scarce(0.01)
    shape = replace(SHAPE, arrangement=arrangement)
    assert not evaluation.tables(shape, Route((0, 1), (2, 2)))
    assert not list(evaluation.candidates(shape, Route((0, 1), (2, 2))))


@pytest.mark.parametrize("stages", [(1, 4), (4, 1), (2, 4), (4, 2)])
def test_the_bound_of_a_shape_does_not_depend_on_those_that_were_examined_before(stages):
    """Ranks of two stages have half of the messages of four, and ranks of a fold twice those of one leg."""
    shapes = [replace(SHAPE, num_stages=count, arrangement=each) for count in stages for each in LEGS]
    for memory_share in np.linspace(0.1, 0.6, 15):
        shared = scarce(memory_share, messages=2e9)
        for shape in shapes:
            assert shared.shape_bound(shape) == scarce(memory_share, messages=2e9).shape_bound(shape)


@pytest.mark.parametrize("memory_share", [0.02, 0.25, 0.5])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize(("parameters", "messages"), [(800_000_000, 0.0), (80_000_000, 1e10)])
def test_families_have_exactly_the_shapes_that_may_fit_memory(memory_share, zero_stage, parameters, messages):
    sites = (site(f"s{number}", hosts=4, gpus_per_host=4) for number in range(2))
    work = model(layers=LAYERS, parameters=parameters, tokens=16384, width=8192)
    work = replace(work, message_bytes=messages or work.message_bytes)
    request = Request(sequences=16, max_memory=memory_share, pins={"zero_stage": zero_stage})
    space = Space(cluster(*sites), work, request)
    kept, fitting = set(), set()
    for _, degrees in space.degrees:
        for family in space.families(degrees, range(1, 9), alone=False):
            kept.update(shape for stages in family.counts for _, shape in space.members(family.shape, stages))
            assert memory_share > 0.02, "a family that fits with no number of stages costs no effort"
    for shape in shapes(space.cluster, work, request):
        if shape.arrangement == "straight" and space.evaluation.shape_bound(shape) is not None:
            fitting.add(shape)
    assert kept == fitting


def _table(finite, fits):
    """Seconds of a rank that may hold one or two of three layers, by its first layer and its last in its window."""
    found = np.full((2, 2), inf)
    for start, last in ((0, 0), (0, 1), (1, 1)):
        if last - start + 1 in fits:
            found[start, last] = finite[last - start]
    return found


sets = st.lists(st.sets(st.integers(1, 2), min_size=1), min_size=2, max_size=2)


@given(sets, sets, st.none() | sets)
def test_the_best_cuts_fit_in_the_pipeline_and_behind_it(pipeline, behind, marked):
    """A rank may have memory for layers in the pipeline, or for the optimiser's step behind it, and not for both."""
    rank_s, ends_s = [_table((3.0, 5.0), fits) for fits in pipeline], [_table((1.0, 2.0), fits) for fits in behind]
    marked_s = None if marked is None else [_table((2.0, 4.0), fits) for fits in marked]
    table = CutTable(rank_s, ends_s, ((0,), (1,)), marked_s)

    def fit(counts):
        held = [counts[rank] in pipeline[rank] for rank in range(2)]
        if marked is not None:
            held = [any(counts[rank] in marked[rank] and held[1 - rank] for rank in range(2))]
        return all(held) and all(counts[rank] in behind[rank] for rank in range(2))

    possible = {counts for counts in ((1, 2), (2, 1)) if fit(counts)}
    assert set(table.below(inf)) == possible
    assert set(table.best()) <= possible and bool(set(table.best())) == bool(possible)
