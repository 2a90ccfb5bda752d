"""Bounds by hand: a second a layer and pass, and each of the things that may keep a pipeline longest."""

from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.planner.planned import cluster, site
from weft.pipeline.costs import LinkCost
from weft.pipeline.planner import sharing
from weft.pipeline.planner.bounds import Bounds
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.network import Network
from weft.pipeline.planner.request import MOST_CELL
from weft.pipeline.planner.routes import Route
from weft.pipeline.workload import LayerWork, ModelWork

UNIT = 1000
"""Parameters of a layer."""
COLLECTIVE_S, OPTIMIZER_S = 7.0, 11.0
"""Seconds per layer's share, each step."""


class SimpleNetwork(Network):
    """A link's occupancy is twice its transit."""

    def link_cost(self, here, there, shape):
        link = self.cluster.link(here, there)
        return SimpleNamespace(
            latency_s=link.latency_s,
            transit_s=lambda size: size / link.bandwidth_bps,
            occupancy_s=lambda size: 2 * size / link.bandwidth_bps,
        )

    def local_link(self, bps_of_gpu, shape):
        return LinkCost(bandwidth_bps=bps_of_gpu)


class Simple(Estimates):
    """A layer takes a second forward, one for its input's gradient and one for its weights'; half on an H100."""

    def stage_seconds(self, work, num_layers, shape, site):
        seconds = work.parameters / UNIT * {"A100": 1.0, "H100": 0.5}[site.gpu.name] * shape.microbatch_size
        return seconds, seconds, seconds

    @cached_property
    def network(self):
        return SimpleNetwork(self.cluster)

    def collective_s(self, work, shape, site):
        return COLLECTIVE_S * work.parameters / UNIT * (shape.replicas > 1)

    def optimizer_s(self, work, shape, site):
        return OPTIMIZER_S * work.parameters / UNIT


def of(*hosts, gpus=(), prices=(), layers=8, latency_s=0.0, transit_s=0.0, cell=None, links=None, inside_s=0.0):
    """Bounds of a model of equal layers on sites with so many GPUs.

    A micro-batch takes ``transit_s`` per link, and ``inside_s`` between ranks of a site.
    """
    kinds = gpus or ["A100"] * len(hosts)
    sites = [
        site(str(number), hosts=count, gpus_per_host=1, gpu=gpu, price=price)
        for number, (count, gpu, price) in enumerate(zip(hosts, kinds, prices or [1.5] * len(hosts), strict=True))
    ]
    sites = [replace(one, network_bps=8 / inside_s if inside_s else float("inf")) for one in sites]
    made = cluster(*sites, latency_s=latency_s, bandwidth_bps=1 / transit_s if transit_s else float("inf"))
    if links is not None:
        made = replace(made, links={pair: link for pair, link in made.links.items() if pair in links})
    nothing, layer = LayerWork(parameters=0), LayerWork(parameters=UNIT)
    work = ModelWork(
        name="by hand",
        sequence_length=1,
        before=nothing,
        layers=(layer,) * layers,
        after=nothing,
        tied_parameters=0,
        message_bytes=1.0,
        attended_bytes=0.0,
    )
    return Bounds(Simple(made, work), cell)


def shape(num_stages, microbatches, **more):
    return Shape(**{"num_stages": num_stages, "replicas": 1, "microbatches": microbatches, "zero_stage": 0} | more)


OPTIMIZER_OF_4 = OPTIMIZER_S * 2


@pytest.mark.parametrize(
    ("bound", "some", "expected_s"),
    [
        (of(8), shape(1, 4), 4 * 8 * 3 + 8 * OPTIMIZER_S),
        # The layers of the fullest rank, 8 on 5.
        (of(8), shape(5, 32), 32 * 2 * 3 + OPTIMIZER_S * 1.6),
        # All ranks share the work, and the later begin later: half of 0 + 1 + 2 + 3 layers' forwards.
        (of(8), shape(4, 4), 4 * 6 + 1.5 + OPTIMIZER_OF_4),
        (of(8), shape(4, 4, microbatch_size=2), 4 * 12 + 3 + OPTIMIZER_OF_4),
        (of(2, 2, latency_s=3.0), shape(4, 4), 4 * 6 + (0.5 + 3 + 2.5) / 2 + OPTIMIZER_OF_4),
        # The first micro-batch there and back, with what goes through all layers and can wait for nothing.
        (of(2, 2, latency_s=50.0), shape(4, 4), 16 + 2 * 50 + OPTIMIZER_OF_4),
        (of(2, 2, transit_s=20.0), shape(4, 4), 16 + 2 * 20 + 3 * 20 + OPTIMIZER_OF_4),
        # A fold crosses twice.
        (of(2, 2, transit_s=20.0), shape(4, 4, arrangement="fold"), 4 * 2 * 20 + OPTIMIZER_OF_4),
        (of(2, 2, latency_s=50.0), shape(4, 4, arrangement="fold"), 16 + 4 * 50 + OPTIMIZER_OF_4),
        (of(2, 2, latency_s=50.0), shape(4, 4, arrangement="site_fold"), 16 + 2 * 50 + OPTIMIZER_OF_4),
        # Each rank but the last one sends inside of a site, one micro-batch after the other.
        (of(8, inside_s=20.0), shape(4, 4), 16 + 2 * 3 * 20 + 3 * 20 + OPTIMIZER_OF_4),
        (of(8, inside_s=20.0), shape(1, 4), 4 * 8 * 3 + 8 * OPTIMIZER_S),
        (of(2, 2, latency_s=50.0, inside_s=20.0), shape(4, 4), 16 + 2 * (50 + 2 * 20) + 3 * 20 + OPTIMIZER_OF_4),
        # Where each site may hold one rank, hops may be between sites only.
        (of(2, 2, 2, 2, latency_s=1.0, inside_s=20.0), shape(4, 4), 4 * 6 + (0.5 + 1 + 2.5) / 2 + OPTIMIZER_OF_4),
        # Replicas: concurrent collectives, and a cell pools their uplinks.
        (of(16), shape(4, 4, replicas=2), 4 * 6 + 1.5 + OPTIMIZER_OF_4 + 2 * COLLECTIVE_S),
        (of(4, 4, transit_s=20.0), shape(4, 4, replicas=2), 16 + 2 * 10 + 70 + OPTIMIZER_OF_4 + 2 * COLLECTIVE_S),
        (
            of(4, 4, transit_s=20.0, cell=1),
            shape(4, 4, replicas=2),
            16 + 2 * 20 + 60 + OPTIMIZER_OF_4 + 2 * COLLECTIVE_S,
        ),
        (
            of(40, 40, transit_s=20.0),
            shape(4, 4, replicas=20),
            16 + 2 * 20 / MOST_CELL + (4 - 1 / MOST_CELL) * 20 + OPTIMIZER_OF_4 + 2 * COLLECTIVE_S,
        ),
        # Twice as fast at one site: a rank there does two thirds of the work. The nearest is taken to be the fastest.
        (
            of(2, 2, latency_s=5.0, gpus=["A100", "H100"]),
            shape(4, 4),
            (4 + 2 / 12 * 0.25 + 2 / 24 * (1.25 + 5)) / (2 / 12 + 2 / 24) + OPTIMIZER_OF_4,
        ),
        # Ranks hold whole layers: three on each of the fast ones, and one on each of the slow ones.
        (of(2, 2, gpus=["A100", "H100"]), shape(4, 4), 4 * 3 * 1.5 + OPTIMIZER_OF_4),
        # The last rank begins late, and the others do its share.
        (of(1, 1, latency_s=12.0), shape(2, 1), 16 + 2 * 12 + OPTIMIZER_S * 4),
    ],
)
def test_what_takes_longest_bounds_a_step(bound, some, expected_s):
    assert bound.step_s(some) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    ("some", "route", "expected"),
    [
        # All work where it costs least: 4 micro-batches of 8 layers, 3 passes of a second each for 1 an hour ...
        (shape(2, 4), Route((), ()), 4 * 8 * 3 * 1.0),
        (shape(2, 4, replicas=4), Route((), ()), 4 * 4 * 8 * 3 * 1.0),
        # ... also where some ranks have to be elsewhere, because these may have next to nothing to do,
        (shape(2, 4), Route((1,), (1,)), 4 * 8 * 3 * 1.0),
        # ... and of half a second for 3 an hour, where no rank is left that could be at the cheapest.
        (shape(2, 4), Route((1,), (2,)), 4 * 8 * 3 * 0.5 * 3.0),
    ],
)
def test_work_costs_what_it_costs_where_that_is_least(some, route, expected):
    bound = of(16, 16, gpus=["A100", "H100"], prices=[1.0, 3.0])
    assert bound.price_seconds(some, route) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("some", "route", "expected_s"),
    [
        # Its one rank sends both ways, each of them for twice the transit: all but the last gradient.
        (shape(4, 4), Route((0, 1, 2), (2, 1, 1)), 4 * (40 + 40) - 40 + 2 * 20),
        (shape(4, 4), Route((0, 1, 2), (1, 2, 1)), 16 + 2 * 40 + 3 * 20),
        (shape(4, 4), Route((0, 1), (2, 2)), 16 + 2 * 20 + 3 * 20),
        (shape(4, 4, arrangement="fold"), Route((0, 1, 2), (2, 1, 1)), 4 * 2 * (40 + 40) - 40 + 2 * 20),
        # What is left lies at the roomiest other site.
        (shape(4, 4), Route((1,), (2,)), 16 + 2 * 20 + 3 * 20),
        (shape(4, 4), Route((2,), (1,)), 16 + 2 * 20 + 3 * 20),
    ],
)
def test_a_route_says_how_far_ranks_are(some, route, expected_s):
    assert of(3, 3, 3, transit_s=20.0).step_s(some, route) == pytest.approx(expected_s + OPTIMIZER_OF_4, rel=1e-12)


@pytest.mark.parametrize("sites", [(), (0,), (1, 2), (3, 0, 1)])
def test_ranks_between_others_send_both_ways_where_each_site_holds_one(sites):
    route = Route(sites, (1,) * len(sites))
    bound = of(1, 1, 1, 1, transit_s=20.0)
    assert bound.step_s(shape(4, 4), route) == pytest.approx(4 * (40 + 40) - 40 + 2 * 2 * 20 + OPTIMIZER_OF_4)
    of_3 = 4 * (40 + 40) - 40 + 2 * 20 + OPTIMIZER_S * 8 / 3
    assert bound.step_s(shape(3, 4), route) == pytest.approx(of_3, rel=1e-3)
    if len(sites) < 2:  # unless one of those to come may have space for two
        assert of(1, 1, 1, 2, transit_s=20.0).step_s(shape(5, 4), route) < 4 * (40 + 40) - 40 + OPTIMIZER_S * 8 / 5


def test_two_further_hops_are_those_that_are_quickest():
    bound = of(1, 1, 1, latency_s=10.0)
    assert bound.step_s(shape(3, 1)) == pytest.approx(16 + 2 * 20 + OPTIMIZER_S * 8 / 3, rel=1e-3)
    assert bound.step_s(shape(3, 1), Route((1,), (1,))) == bound.step_s(shape(3, 1))
    assert bound.step_s(shape(3, 1), Route((1, 2), (1, 1))) == bound.step_s(shape(3, 1))


@pytest.mark.parametrize(
    ("bound", "some", "route", "max_sites", "fits"),
    [
        (of(2, 2), shape(4, 1), Route((), ()), 0, True),
        (of(2, 2), shape(4, 1), Route((), ()), 2, True),
        (of(2, 2), shape(4, 1), Route((), ()), 1, False),
        (of(2, 2), shape(5, 1), Route((), ()), 0, False),
        (of(2, 2, links=()), shape(4, 1), Route((), ()), 0, False),
        (of(2, 2, links=()), shape(2, 1), Route((), ()), 0, True),
        (of(2, 2, links=()), shape(3, 1), Route((0,), (2,)), 0, False),
        (of(2, 2, 2, links=[(0, 1)]), shape(4, 1), Route((2,), (2,)), 0, False),
        (of(2, 2, 2, links=[(0, 1)]), shape(4, 1), Route((0,), (2,)), 0, True),
        (of(2, 2, 2, links=[(0, 1)]), shape(6, 1), Route((), ()), 0, False),
        (of(2, 2, 2, links=[(0, 1), (1, 2)]), shape(6, 1), Route((), ()), 0, True),
        (of(4), shape(2, 1, replicas=2), Route((), ()), 0, True),
        (of(4), shape(2, 1, replicas=3), Route((), ()), 0, False),
        (of(4), shape(2, 1, tensor=4), Route((), ()), 0, False),
    ],
)
def test_what_gpus_links_or_sites_do_not_suffice_for_has_no_bound(bound, some, route, max_sites, fits):
    assert (bound.step_s(some, route, max_sites) is not None) == fits


SECONDS = st.floats(0.01, 100.0)


@given(st.lists(st.tuples(SECONDS, st.floats(0.0, 200.0)), min_size=1, max_size=5), st.integers(1, 50))
def test_work_is_shared_by_those_whom_it_can_reach(spans, count):
    spans = sorted(spans, key=lambda span: span[1])
    step_s = sharing.shared_s(spans, count)
    done = sum(speed * max(0.0, step_s - off_s) for speed, off_s in spans)
    assert done == pytest.approx(count, rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_given_sites_keep_their_ways_and_of_others_the_first_are_nearest(held, rooms):
    """Rank by rank: the n-th of those that are left is as far as the n-th place."""
    given_sites = len(held) // 2
    rooms = [*held[:given_sites], *rooms, sum(held)]
    ranks = list(enumerate(held))
    ways_s = [(room, float(number)) for number, room in enumerate(rooms)]
    found = list(sharing.spans_of(ranks, ways_s, given_sites))
    assert found[:given_sites] == [(number, held[number], float(number)) for number in range(given_sites)]
    each = [(site, way_s) for site, count, way_s in found[given_sites:] for _ in range(count)]
    places = [float(number) for number, room in enumerate(rooms) if number >= given_sites for _ in range(room)]
    of_ranks = [number for number, count in ranks[given_sites:] for _ in range(count)]
    assert each == list(zip(of_ranks, places, strict=False))
    assert all(count > 0 for _, count, _ in found)
    assert list(accumulate(count for _, count, _ in found))[-1] == sum(held)


@pytest.mark.parametrize(
    ("sites", "longer_s"),
    [
        ((0, 2, 1, 3), 0.0),  # one rank's replicas have the fast link: it may be the fullest
        ((2, 0, 3, 1), 0.0),
        ((0, 1, 2, 3), 2 * (0.5 - 0.1)),  # both cross slow ones, there and back
        ((0, 1, 3, 2), 2 * (0.5 - 0.1)),
    ],
)
def test_replicas_apart_reduce_over_the_best_links_that_any_rank_of_a_route_has(sites, longer_s):
    made = cluster(*(site(str(number), hosts=1, gpus_per_host=1) for number in range(4)), bandwidth_bps=float("inf"))
    fast = {pair: replace(link, latency_s=0.1 if pair == (0, 1) else 0.5) for pair, link in made.links.items()}
    apart = Shape(num_stages=2, replicas=2, microbatches=4, zero_stage=0, routes=2)
    bound = Bounds(Simple(replace(made, links=fast), of(1, layers=2)._work))
    assert bound.further_across_s(apart, Route(sites, (1, 1, 1, 1))) == pytest.approx(longer_s)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4), st.integers(1, 40))
def test_ranks_that_hold_whole_layers_take_as_long_as_the_slowest_of_them(ranks, layers):
    """The least step is the first multiple of a rank's seconds at which all layers are held."""
    steps_s = sorted({count * layer_s for _, layer_s in ranks for count in range(layers + 1)})
    least_s = next(one for one in steps_s if sum(many * (one // layer_s) for many, layer_s in ranks) >= layers)
    assert sharing.whole_layers_s(ranks, layers, 0.0) == least_s
    assert sharing.whole_layers_s(ranks, layers, least_s + 0.5) == least_s + 0.5
