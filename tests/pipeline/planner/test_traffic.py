"""Prices of bytes between sites: bounds for every route, and only what travels."""

from dataclasses import replace
from itertools import islice

import pytest

from tests.pipeline.planner.planned import cluster, model, site
from tests.pipeline.planner.random_cases import case
from weft.pipeline.planner.candidates import empty_layout
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import Objective
from weft.pipeline.planner.routes import Route, Routes
from weft.pipeline.planner.search import plan
from weft.pipeline.planner.shapes import shapes
from weft.pipeline.planner.traffic import Traffic


def whole_routes(routes, shape, begun=None):
    """Yield the whole routes of a shape, in any order of sites."""
    for longer in routes.longer(shape, begun):
        if longer.is_whole(shape):
            yield longer
        else:
            yield from whole_routes(routes, shape, longer)


@pytest.mark.parametrize("seed", [seed for seed in range(60) if len(case(seed)[0].sites) == 3][:8])
def test_no_layout_pays_less_for_bytes_than_the_least_of_its_shape_and_of_each_part_of_its_route(seed):
    some, work, request = case(seed)
    links = {
        pair: replace(link, egress_price=0.01 * (number + 1)) for number, (pair, link) in enumerate(some.links.items())
    }
    some = replace(some, links=links)
    traffic, routes, compared = Traffic(Estimates(some, work)), Routes(some, request), 0
    for shape in islice(shapes(some, work, request), 0, 4000, 17):
        layers = len(work.layers)
        counts = [
            layers // shape.virtual_stages + (one < layers % shape.virtual_stages)
            for one in range(shape.virtual_stages)
        ]
        for route in islice(whole_routes(routes, shape), 20):
            layout = replace(empty_layout(shape, route), layers=tuple(counts))
            if any(some.link(*pair) is None for pair in layout.links):
                continue
            paid = traffic.egress(shape, route) + traffic.reduced_egress(layout)
            parts = [Route(route.sites[:end], route.stages[:end]) for end in range(len(route.sites) + 1)]
            assert all(traffic.least_egress(shape, part) <= paid * (1 + 1e-9) for part in parts)
            compared += len(route.sites) > 1
    assert compared


def test_a_plan_by_cost_weighs_free_slow_links_against_fast_ones_with_a_price():
    found = plan(*case(116))
    assert found.request.objective is Objective.cost and {0.0, 0.02} == {
        link.egress_price for link in found.cluster.links.values()
    }
    assert found.gap < 0.01 and found.best.egress_per_step == 0


@pytest.mark.parametrize("tensor", [1, 2])
def test_replicas_exchange_only_what_is_trained(tensor):
    """Adapters train one weight in a hundred, and each GPU of a tensor group holds some of their factors whole."""
    work = model()
    layers = tuple(
        replace(
            one, trained_parameters=one.parameters // 100, whole_parameters=one.parameters // 200, trained_flops=0.0
        )
        for one in work.layers
    )
    before, after = (replace(one, trained_parameters=0, trained_flops=0.0) for one in (work.before, work.after))
    adapted = replace(work, before=before, layers=layers, after=after)
    some = cluster(site("a"), site("b"))
    shape = Shape(num_stages=2, replicas=2, tensor=tensor, microbatches=4, routes=2)
    layout = replace(empty_layout(shape, Route((0, 1), (2, 2))), layers=(4, 4))
    traffic = Traffic(Estimates(some, adapted))
    trained = sum(one.trained_parameters + (tensor - 1) * one.whole_parameters for one in layers)
    sent = (4 + 2) * trained  # fp32 gradients and bf16 weights, half of each from either site to the other
    assert traffic.wan_bytes(layout, Route((0, 1), (2, 2))) == pytest.approx(sent)
    assert traffic.reduced_egress(layout) == pytest.approx(sent / 1e9 * 0.02)
    assert traffic.least_egress(shape) <= traffic.reduced_egress(layout)
