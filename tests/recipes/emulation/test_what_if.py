"""Tests of what-if conditions, by name."""

import random

import pytest

from weft.comm.emulated.operation_log import EmulationError
from weft.pipeline.costs import CostModel, LinkCost
from weft.recipes.emulation.what_if import TIMEOUT_S, WhatIf


def test_conditions_add_up():
    what_if = WhatIf.parse(["slow-rank=7:0.8", "slow-rank=9:0.5", "speed=0-2:2", "speed=5:0.5", "bandwidth=2"])
    assert what_if.slow == {7: 0.8, 9: 0.5}
    assert what_if.speed == {0: 2.0, 1: 2.0, 2: 2.0, 5: 0.5}
    assert what_if.factor(7, 1) == 1.6
    assert what_if.factor(8, 3) == 1.0


def test_links_between_sites_change_and_no_others():
    link = LinkCost(latency_s=0.02, bandwidth_bps=1e9, pair_bps=5e8)
    costs = CostModel(stages=(), local=link, wan=link, wan_links=(((0, 1), link),))
    changed = WhatIf.parse(["bandwidth=2", "latency-ms=5"]).costs(costs)
    assert changed.local == link
    assert changed.wan == changed.link(0, 1) == LinkCost(latency_s=0.025, bandwidth_bps=2e9, pair_bps=1e9)


def test_jitter_and_losses_delay_messages():
    rng = random.Random(1)
    jitter = WhatIf.parse(["jitter-ms=10"])
    assert all(0 <= jitter.late_s(rng) <= 0.01 for _ in range(100))
    losses = [WhatIf.parse(["loss=0.5"]).late_s(rng) for _ in range(400)]
    assert set(losses) == {0.0, TIMEOUT_S}
    assert 100 < losses.count(TIMEOUT_S) < 300
    assert WhatIf().late_s(rng) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "slow-rank=7",
        "slow-rank=7:0",
        "speed=a:2",
        "bandwidth=-1",
        "loss=1.5",
        "replicas=0",
        "jitter-ms=nan",
        "gpu=H100",
    ],
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(EmulationError, match=f"--what-if {text}: give slow-rank=RANK:SPEED"):
        WhatIf.parse([text])


def test_ranks_and_stages_that_are_not_there_are_refused():
    with pytest.raises(EmulationError, match="--what-if slow-rank=16: the job has 0 to 15"):
        WhatIf.parse(["slow-rank=16:0.5"]).check(16, 4)
    with pytest.raises(EmulationError, match="--what-if speed=4: the job has 0 to 3"):
        WhatIf.parse(["speed=2-4:0.5"]).check(16, 4)
