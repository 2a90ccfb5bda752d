"""Tests of a layout's costs: those of the documented model, and no sites of routes reduce faster than the least."""

import random
from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.planner.brute_force import shapes
from tests.pipeline.planner.own_costs import (
    deferred_bytes,
    over_replicas_s,
    rank_memory,
    saved_bytes,
    stage_seconds,
    step_bytes,
    weights_of,
)
from tests.pipeline.planner.own_model import Own
from tests.pipeline.planner.planned import cluster, model, site
from tests.pipeline.planner.random_cases import case
from weft.pipeline.planner.cluster import Cluster, Link
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Shape

SHAPES = 60
"""Shapes of a cluster that are compared."""


def some_shapes(own, rng):
    """Some of all shapes of a cluster, and those with several routes or shared experts among them."""
    found = list(shapes(own))
    special = [shape for shape in found if shape.routes > 1 or shape.expert > 1]
    return [shape for pool in (found, special) for shape in rng.sample(pool, min(SHAPES, len(pool)))]


@pytest.mark.parametrize("seed", [*range(16), 116])
def test_costs_of_a_rank_are_those_of_the_documented_model(seed):
    """Seconds and bytes of micro-batches, collectives, optimiser and memory of ranks with any layers, at any site."""
    some, work, request = case(seed)
    own, estimates, rng = Own(some, work, request), Estimates(some, work), random.Random(seed)
    for shape in some_shapes(own, rng):
        start = rng.randrange(len(work.layers))
        stop = rng.randint(start + 1, len(work.layers))
        part, count = own.part((start, stop)), stop - start
        held = estimates.rank_work(range(start, stop), first=start == 0, last=stop == len(work.layers))
        for name, value in vars(part).items():
            assert getattr(held, name) == pytest.approx(value), name
        at = rng.choice(some.sites)
        cost = estimates.stage_cost(held, count, shape, at)
        seconds = cost.forward_s, cost.input_s, cost.weight_s
        assert seconds == pytest.approx(stage_seconds(part, count, shape, at, some, work)), shape
        saved = (
            saved_bytes(part, count, shape, work),
            deferred_bytes(part, count, shape, work),
        )
        assert (cost.activation_bytes, cost.weight_saved_bytes) == pytest.approx(saved)
        assert cost.output_bytes == work.message_bytes * shape.microbatch_size
        memory, documented = estimates.memory(held, count, shape), rank_memory(part, count, shape, work)
        assert memory.total == pytest.approx(documented.total, rel=1e-6), shape
        assert memory.headroom(1e12) == pytest.approx(documented.headroom(1e12), rel=1e-6)
        assert estimates.parameters(held, shape) == pytest.approx(sum(weights_of(part, shape)))
        assert estimates.collective_s(held, shape, at) == pytest.approx(
            over_replicas_s(step_bytes(shape), part, shape, at)
        )
        _, optimizer_s = own.rank_ends_s(((start, stop),), some.sites.index(at), shape)
        assert estimates.optimizer_s(held, shape, at) == pytest.approx(optimizer_s)
        sites = rng.sample(range(len(some.sites)), shape.routes)
        assert estimates.across_s(held, shape, sites) == pytest.approx(own.over_wan_s(part, shape, sites))
        for here, there in some.links:
            found, link = estimates.network.link_cost(here, there, shape), own.link(here, there, shape)
            assert (found.latency_s, found.bandwidth_bps, found.pair_bps) == pytest.approx(
                (link.latency_s, link.bandwidth_bps, link.pair_bps)
            )


MADE = Estimates(cluster(site("here", hosts=4), site("there", hosts=4)), model())


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8)), min_size=2, max_size=5),
    st.lists(
        st.none() | st.tuples(st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([1e6, 3e6, 1e8])),
        min_size=10,
        max_size=10,
    ),
    st.integers(2, 4),
    st.sampled_from([0.0, 1e3, 1e6]),
    st.sets(st.integers(0, 4), max_size=3),
)
def test_no_sites_of_routes_reduce_faster_than_the_least(sites, links, routes, sent, known):
    """Against all sets of sites: the cheapest bytes, and the shortest delay besides those that are known."""
    known = sorted(site for site in known if site < len(sites))
    made = Cluster(
        sites=tuple(
            replace(MADE.cluster.sites[0], name=str(number), hosts=hosts, gpus_per_host=gpus)
            for number, (hosts, gpus) in enumerate(sites)
        ),
        links={
            pair: Link(latency_s=link[0], bandwidth_bps=link[1])
            for pair, link in zip(combinations(range(len(sites)), 2), links, strict=False)
            if link is not None
        },
    )
    estimates = replace(MADE, cluster=made)

    def least_s(here, settled):
        near = {
            there: link
            for there, site in enumerate(made.sites)
            if there != here and site.gpus and (link := made.link(here, there)) is not None
        }
        settled = set(settled) - {here}
        best = inf
        for others in combinations(near, routes - 1):
            if settled <= set(others):
                byte_s = sum(8 * made.sites[here].gpus_per_host / near[there].bandwidth_bps for there in others)
                delay_s = max(
                    [near[there].latency_s for there in settled] + [min(one.latency_s for one in near.values())]
                )
                best = min(best, 2 * delay_s + sent * byte_s)
        return best

    with_gpus = [number for number, site in enumerate(made.sites) if site.gpus]
    for here in with_gpus:
        if len(set(known) - {here}) < routes:
            found_s = estimates.network.least_from_s(here, known, routes, sent)
            assert found_s == pytest.approx(least_s(here, known), rel=1e-9)
    some = Shape(num_stages=2, replicas=routes, microbatches=4, routes=routes)
    sent = estimates.across_bytes(MADE.work.layers[0], some)
    expected_s = min((least_s(here, ()) for here in with_gpus), default=inf)
    assert estimates.least_across_s(MADE.work.layers[0], some) == pytest.approx(expected_s, rel=1e-6)
    assert estimates.least_across_s(MADE.work.layers[0], Shape(num_stages=2, replicas=routes, microbatches=4)) == 0.0
