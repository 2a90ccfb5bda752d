"""The probe: how it searches, what it finds over loopback, and its cache."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.wan.test_endpoint import KEY, noise
from weft.comm.channel import TensorSpec
from weft.comm.links import TOLERANCE, LinkProfile, fewest
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.probe import ProfileCache, probe, probe_both, search
from weft.conf.host.measurements import Measurements


@given(window=st.floats(1.0, 100.0), link=st.floats(1.0, 3000.0), most=st.integers(1, 64))
def test_on_an_ideal_link_the_search_finds_enough_connections_and_not_many_more(window, link, most):
    """``window`` is what one connection carries, ``link`` what all can."""
    tried = []

    def measure(connections):
        tried.append(connections)
        return min(connections * window, link)

    rates = search(measure, most=most)
    found = fewest(rates)
    reachable = min(most * window, link)
    assert rates[found] * (1 + TOLERANCE) >= reachable
    least = min(n for n in range(1, most + 1) if min(n * window, link) * (1 + TOLERANCE) >= reachable)
    assert least <= found <= max(least + 1, 1.4 * least)
    assert len(tried) == len(set(tried)) <= 12
    assert max(tried) <= most


def test_fewest_ignores_gains_below_the_tolerance():
    assert fewest({1: 100.0}) == 1
    assert fewest({1: 100.0, 2: 104.0, 4: 104.5}) == 1
    assert fewest({1: 100.0, 2: 200.0, 4: 207.0}) == 2
    assert fewest({1: 100.0, 2: 90.0, 4: 300.0}) == 4


@contextmanager
def linked(*, connections):
    with (
        WanEndpoint(rank=0, bind="127.0.0.1", key=KEY, connections=connections) as near,
        WanEndpoint(rank=1, bind="127.0.0.1", key=KEY) as far,
    ):
        far.link(0)
        near.link(1, address=far.address)
        yield near, far


PROFILE = LinkProfile(rtt_s=0.04, rates_bps=((1, 5e7), (2, 1e8), (8, 4.9e8), (16, 5e8)))


def test_a_profile_says_what_a_planner_asks():
    assert PROFILE.latency_s == 0.02
    assert PROFILE.single_bps == 5e7
    assert PROFILE.aggregate_bps == 5e8
    assert PROFILE.connections == 8


def test_a_plan_counts_on_what_is_carried_both_ways():
    assert PROFILE.training_bps == 5e8
    assert replace(PROFILE, opposed_bps=4.5e8).training_bps == 4.5e8


def test_both_ends_learn_both_ways():
    with linked(connections=4) as (near, far), ThreadPoolExecutor() as pool:
        there = pool.submit(probe_both, far, 0, first=False, most=4, seconds=0.02)
        out, back = probe_both(near, 1, first=True, connections=3, most=4, seconds=0.02)
        assert there.result(60.0) == (back, out)
        assert out.opposed_bps > 0 < back.opposed_bps


def test_a_probe_needs_no_call_at_the_other_end():
    with linked(connections=4) as (near, far):
        profile = probe(near, 1, most=4, seconds=0.02)
        assert set(dict(profile.rates_bps)) <= {1, 2, 3, 4}
        assert 0 < profile.rtt_s < 1
        assert profile.single_bps > 0
        assert far.counters(0).received_bytes == 0  # thrown away
        received = far.channel(0).recv("a", TensorSpec((1000,), torch.uint8))
        near.channel(1).send("a", noise(1000)).wait()  # and the link is in order
        assert torch.equal(received.wait(), noise(1000))


def test_the_cache_keeps_what_others_wrote_and_survives_damage(tmp_path):
    cache = ProfileCache(tmp_path / "deep" / "links.json")
    assert cache.read() == {}
    cache.add({"east-west": PROFILE})
    cache.add({"west-east": PROFILE})
    assert cache.read() == {"east-west": PROFILE, "west-east": PROFILE}
    assert [path.name for path in cache.path.parent.iterdir()] == ["links.json"]
    for damage in ("", "[1]", '{"east-west": {"rtt_s": 1}}', '{"east-west": 3}'):
        cache.path.write_text(damage)
        assert cache.read() == {}
    cache.add({"east-west": PROFILE})
    assert cache.read() == {"east-west": PROFILE}
    assert Measurements(cache.path).read()["east-west"].at > 0


def test_an_endpoint_that_cannot_open_more_connections_is_probed_with_what_it_has():
    with linked(connections=1) as (near, _):
        assert probe(near, 1, seconds=0.02).connections == 1


@pytest.mark.parametrize("raw", [{}, {"rtt_s": 1.0}])
def test_a_profile_without_rates_is_no_profile(raw, tmp_path):
    path = tmp_path / "links.json"
    Measurements(path).store({"a": raw})
    assert ProfileCache(path).read() == {}
