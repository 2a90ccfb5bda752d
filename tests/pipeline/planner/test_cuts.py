"""Tables of cuts bound every cut, also where the memory of the fullest rank binds all of them."""

from dataclasses import replace
from math import inf

import pytest

from tests.pipeline.planner.planned import cluster, model, site
from tests.pipeline.planner.test_claims import sums
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import LEGS, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.routes import Route

SHAPE = Shape(num_stages=4, replicas=1, microbatches=16, zero_stage=0)
LAYERS = 10
UNEVEN = [500, 300, 300, 500, 300, 400, 300, 500, 300, 400]
"""Millions of weights, of layers that differ."""


def scarce(memory_share, *, gpus=("A100", "A100"), is_even=True):
    """An evaluation on two sites of two GPUs, whose memory is filled by so much."""
    sites = (site(f"s{number}", hosts=1, gpus_per_host=2, gpu=gpu) for number, gpu in enumerate(gpus))
    work = model(layers=LAYERS, parameters=400_000_000, tokens=16384, width=8192)
    if not is_even:
        layers = zip(work.layers, UNEVEN, strict=True)
        work = replace(work, layers=tuple(replace(layer, parameters=number * 10**6) for layer, number in layers))
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
