"""A run with fewer replicas is refused for want of memory only where its own plan would need more than there is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.supervision.driver.test_hosts import job
from tests.engine.supervision.driver.test_plan_rows import plan_of
from weft.engine.planning.plan_file import plan_to_json
from weft.engine.supervision.driver.culprit import shortage
from weft.engine.supervision.driver.hosts import choose_hosts


def with_memory(plan, device_bytes):
    """The plan's text, on devices of another size."""
    tree = json.loads(plan_to_json(plan))
    tree["facts"]["device_bytes"]["value"] = device_bytes
    return json.dumps(tree)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3), st.integers(2, 6), st.data())
def test_what_is_refused_does_not_fit(zero, before, data):
    after = data.draw(st.integers(1, before - 1))
    fewer = plan_of((2,), after, zero=zero)
    needed = max(memory.total for memory in fewer.memory)
    text = with_memory(plan_of((2,), before, zero=zero), needed)
    assert shortage(text, after, zero_stage=zero) == "", "by its own plan it fits"
    tiny = with_memory(plan_of((2,), before, zero=zero), 1.0)
    assert "GiB or more, and has" in shortage(tiny, after, zero_stage=zero)
    assert shortage(tiny, before, zero_stage=zero) == "", "it has run so before"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ranks": 3}', '{"ranks": [[0]], "facts": {"device_bytes": null}}'])
def test_no_plan_refuses_nothing(text):
    assert shortage(text, 1, zero_stage=1) == ""


def test_a_site_that_is_lost_is_waited_for_where_the_other_has_too_little_memory(tmp_path):
    sites = {"east": {"e0": 2, "e1": 2}, "west": {"w0": 2, "w1": 2}}
    config = job(tmp_path, sites, stages=4, links=[("east", "west")])
    away = {"e0", "e1"}
    assert choose_hosts(config, away=away).sites == {"west": 4}
    with pytest.raises(ValueError, match="1 replicas of 4 stages: too much for it"):
        choose_hosts(config, away=away, shortage=lambda replicas: "too much for it")
