"""The jitter that a run measures, and plans that count on it."""

from dataclasses import replace
from math import exp, inf, nan
from random import Random
from types import SimpleNamespace

import pytest

from tests.engine.planning.test_adaptation import request_of
from weft.engine.planning.replanning import propose
from weft.engine.planning.spreads import LinkMeter, with_jitter
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.generators import generate
from weft.pipeline.jitter import MOST_JITTER, jitter_of
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement

TRANSFERS, NUM_BYTES = 8, 100_000


class Link:
    """Counters of a link to rank 1 whose transfers vary."""

    def __init__(self, jitter):
        self.peers, self._random, self._jitter = {1: "a to b"}, Random(0), jitter
        self.busy_s, self.sent_bytes = 3.0, 10**9

    def run_step(self, num_bytes=NUM_BYTES):
        for _ in range(TRANSFERS):
            self.busy_s += 1e-8 * num_bytes * exp(self._jitter * self._random.gauss())
            self.sent_bytes += num_bytes

    def counters(self, peer):
        return SimpleNamespace(busy_s=self.busy_s, sent_bytes=self.sent_bytes)


def meter_of(link, steps=60):
    placement = Placement.straight(2, (1, 1))
    engine = SimpleNamespace(
        plan=SimpleNamespace(placement=placement),
        wan=SimpleNamespace(endpoint=link),
        layout=SimpleNamespace(position=lambda rank: SimpleNamespace(site=rank, stage=rank)),
        schedule=lower(generate("1f1b", placement, TRANSFERS)),
        global_rank=0,
        pipe_rank=0,
    )
    return LinkMeter(engine, steps)


@pytest.mark.parametrize("jitter", [0.0, 0.2, 0.5])
def test_the_jitter_of_transfers_follows_from_the_rates_of_steps(jitter):
    link = Link(jitter)
    meter = meter_of(link)
    for _ in range(61):
        meter.step_ended()
        link.run_step()
    assert meter.jitters() == [0.0, pytest.approx(jitter, rel=0.3, abs=1e-6), 0.0, 0.0]
    assert meter.rates() == [0.0, pytest.approx(1e-8 * exp(jitter**2 / 2), rel=0.1), 0.0, 0.0]
    assert meter.rates() == [0.0] * 4  # nothing was sent since


def test_a_link_with_few_bytes_or_without_time_is_not_measured():
    link = Link(0.5)
    meter = meter_of(link)
    for _ in range(5):
        meter.step_ended()
        link.run_step(num_bytes=100)
    assert meter.jitters() == meter.rates() == [0.0] * 4


def test_jitter_that_is_no_number_or_huge_is_not_planned_with():
    costs = CostModel.unit(2, wan=LinkCost(latency_s=1.0, jitter=0.3))
    found = with_jitter(costs, (nan, inf), (0.0, nan, 0.4, 0.0), 2)
    assert [stage.jitter for stage in found.stages] == [0.0, MOST_JITTER]
    assert (found.link(0, 1).jitter, found.link(1, 0).jitter) == (0.3, 0.4)
    assert jitter_of([(), (0.0, -1.0), (1e-300, 1e300)]) == MOST_JITTER and jitter_of([]) == 0.0


def sampling(request):
    """The request of a run whose configuration has samples."""
    return replace(request, config=replace(request.config, jitter_samples=8))


def jittery(request, *stages, link=0.0):
    measured = [with_jitter(costs, stages, (0.0, link, link, 0.0), 2) for costs in request.measured]
    return replace(request, measured=tuple(measured))


def test_without_measured_jitter_the_plan_is_that_by_medians():
    factors = (4.0, 0.2, 0.2)
    assert propose(sampling(request_of(factors))) == propose(request_of(factors))


def test_levels_are_priced_by_the_jitter_that_the_run_measured():
    request = sampling(request_of((4.0, 0.2, 0.2)))
    medians, sampled = propose(request), propose(jittery(request, 0.6, 0.1))
    prices = zip(medians.levels, sampled.levels, strict=True)
    assert all(by_samples.step_s > by_medians.step_s for by_medians, by_samples in prices if by_samples.name != "evict")
    assert propose(jittery(request, 0.6, 0.1)) == sampled
