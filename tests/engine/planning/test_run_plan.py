"""The dry run and the ranks of a run hold one plan."""

import json
from dataclasses import replace
from itertools import pairwise
from math import isfinite

import pytest

from tests.comm.collectives.balanced import regular
from tests.engine.planning.given import given_facts
from tests.engine.planning.planned import plans_of_ranks
from tests.engine.tiny import tiny_config
from weft.comm.collectives import AlphaBeta, CollectiveCosts, LinkClass
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.links import LinkProfile
from weft.comm.values import decode, encode
from weft.conf.schema import LinkConfig, Partition
from weft.engine.layout import RankLayout
from weft.engine.planning.facts import PROBED
from weft.engine.planning.plan_file import plan_to_json
from weft.engine.planning.run_plan import RunPlan, plan_run
from weft.pipeline.costs import LinkCost
from weft.tools.dry_run import expected_plan
from weft.tools.ranks import run_ranks

RANKS = 4
# Arguments of `tiny_config`; then whether collectives have been measured, and the partition.
CASES = {
    "1f1b": ({"stages": 4}, False, "workload"),
    "gpipe, odd": ({"schedule": "gpipe", "stages": 4, "microbatches": 5}, False, "workload"),
    "gpipe, fold": ({"schedule": "gpipe", "placement": "fold", "stages": 4}, False, "workload"),
    "interleaved": ({"schedule": "interleaved", "stages": 4, "microbatches": 8}, False, "workload"),
    "w": ({"schedule": "w", "placement": "fold", "stages": 4}, False, "workload"),
    "dualpipev": ({"schedule": "dualpipev", "placement": "fold", "stages": 4, "microbatches": 8}, False, "workload"),
    "w, context": ({"schedule": "w", "placement": "fold", "stages": 2, "context": 2}, True, "workload"),
    "auto, expert": ({"schedule": "auto", "placement": "fold", "stages": 2, "expert": 2}, True, "workload"),
    "zbv": ({"schedule": "zbv", "placement": "fold", "stages": 4}, False, "workload"),
    "auto": ({"schedule": "auto", "placement": "any", "stages": 4}, False, "workload"),
    "auto, split by cost": ({"schedule": "auto", "placement": "fold", "stages": 4, "layers": 11}, False, "workload"),
    "two replicas": ({"stages": 2, "zero": 1}, False, "workload"),
    "two replicas, measured": ({"stages": 2, "zero": 1}, True, "workload"),
    "ZeRO-2, measured": ({"schedule": "w", "placement": "fold", "stages": 2, "zero": 2}, True, "workload"),
    "ZeRO-3 in one stage, measured": ({"stages": 1, "zero": 3}, True, "workload"),
    "together": ({"schedule": "interleaved", "stages": 2, "zero": 1, "microbatches": 6}, True, "workload"),
    "none": ({"schedule": "interleaved", "stages": 2, "zero": 1, "microbatches": 6}, True, "none"),
    "primitive": ({"schedule": "interleaved", "stages": 2, "zero": 1, "microbatches": 6}, True, "primitive"),
    "group": ({"schedule": "interleaved", "stages": 2, "zero": 3, "microbatches": 6}, True, "group"),
    "two sites": ({"schedule": "auto", "placement": "any", "stages": 4, "sites": (2, 2)}, False, "workload"),
    "three sites": ({"schedule": "w", "placement": "site_fold", "stages": 4, "sites": (1, 2, 1)}, False, "workload"),
    "cells": ({"schedule": "auto", "placement": "any", "stages": 2, "sites": (1, 1), "cell": 2}, True, "workload"),
    "tensor": ({"stages": 2, "tensor": 2}, False, "workload"),
    "context, ZeRO-1, two sites": ({"stages": 2, "context": 2, "zero": 1, "sites": (1, 1)}, False, "workload"),
    "expert": ({"stages": 2, "expert": 2}, False, "workload"),
    "cells, 1f1b": ({"stages": 2, "sites": (1, 1), "cell": 2, "zero": 1}, True, "none"),
}


def run_of(keywords, measured, partition, folder):
    config = tiny_config(**{"layers": 8, **keywords})
    config.cluster.ranks = RANKS
    names = [site.name for site in config.cluster.sites]
    config.cluster.links = [LinkConfig(sites=[*pair], latency_ms=1, bandwidth_mbps=200) for pair in pairwise(names)]
    config.pipeline.search_seconds = 0.0  # a search that time cuts off has no one answer
    config.zero.partition = Partition[partition]
    config.data.cache_dir = str(folder / ("measured" if measured else "bare"))
    return config


@pytest.fixture
def costs_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as ranks have it
    links = CollectiveCosts.of_links(
        {LinkClass.intra: AlphaBeta(1e-2, 1e-5)}
    )  # slow, however fast this machine computes
    for replicas in (2, 4):
        key = topology_key(regular(1, replicas), "cpu")
        CostCache.in_folder(str(tmp_path / "measured")).write(key, links)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_dry_run_and_every_rank_hold_the_same_rows(costs_are_known):
    configs = [run_of(*case, costs_are_known) for case in CASES.values()]
    expected = [expected_plan(config) for config in configs]
    of_ranks = run_ranks(RANKS, plans_of_ranks, configs, timeout_s=180)
    for number, (name, dry) in enumerate(zip(CASES, expected, strict=True)):
        for rank, plans in enumerate(of_ranks):
            assert plans[number].row(rank) == dry.row(rank), f"{name}: rank {rank}"
            without_sources = replace(plans[number], facts=replace(plans[number].facts, sources=dry.facts.sources))
            assert without_sources == dry, name
    plans = dict(zip(CASES, expected, strict=True))
    assert plans["together"].overlap.together == 6 and plans["none"].overlap is None
    assert plans["together"].row(0) != plans["none"].row(0) == plans["primitive"].row(0)
    assert set(plans["cells"].schedules) == {2}
    assert plans["cells"].step_s == max(plans["cells"].predicted(line).step_s for line in (0, 1))


def test_a_plan_goes_by_its_facts_alone():
    config, facts = tiny_config(stages=4, layers=4), given_facts(RankLayout((4,)))
    plan = plan_run(config, facts)
    assert plan == plan_run(config, facts)
    slow = plan_run(config, replace(facts, flops_per_s=1e11))
    assert slow.step_s == pytest.approx(10 * plan.step_s) and slow.schedules == plan.schedules
    assert plan.predicted().step_s == plan.step_s
    known = replace(facts, flops_per_s=None, stage_costs={4: slow.costs.stages})
    assert plan_run(config, known).step_s == slow.step_s
    with pytest.raises(ValueError, match="costs are known of 3 virtual stages, and the placement has 4"):
        plan_run(config, replace(known, stage_costs={3: slow.costs.stages[:3]}))


def test_a_plan_reaches_other_ranks_and_files_whole(costs_are_known):
    plan = expected_plan(run_of(*CASES["together"], costs_are_known))
    assert decode(encode(plan), (RunPlan,)) == plan
    tree = json.loads(plan_to_json(plan))
    assert tree["schedules"]["1"]["rows"][0].startswith("0UNSHARD 2UNSHARD 0F0 ")
    assert tree["predicted"]["step_s"] == plan.step_s and len(tree["memory"]) == 2
    assert tree["overlap"]["together"] == 6 and "cache" in tree["facts"]["collectives"]["source"]
    unknown = {name for name, fact in tree["facts"].items() if fact["value"] and not fact["source"]}
    assert not unknown, "every fact has a source"


def test_the_slowest_probe_counts_where_no_bandwidth_is_known():
    def profile(rate):
        return LinkProfile(rtt_s=0.02, rates_bps=((1, 1e6), (8, rate)))

    facts = given_facts(RankLayout((1, 1, 1), 2))
    given = LinkCost(latency_s=0.003, bandwidth_bps=1e8)
    unknown = LinkCost(latency_s=0.004, pair_bps=6e6)
    facts = replace(facts, links=replace(facts.links, pairs=(((1, 2), given), ((0, 1), unknown))))
    rates = {(0, 2): 9e6, (1, 3): 7e6, (2, 0): 5e6, (2, 4): 1e6}
    found = facts.with_links({hop: profile(rate) for hop, rate in rates.items()})
    pairs = dict(found.links.pairs)
    assert pairs[0, 1] == LinkCost(latency_s=0.01, bandwidth_bps=7e6, pair_bps=6e6, streams=8)
    assert pairs[1, 0].bandwidth_bps == 5e6
    assert pairs[1, 2] == given, "a figure that is known stays"
    assert found.sources["links"] == f"given; sites 0 to 1, 1 to 0: {PROBED}"
    assert facts.with_links({}) is facts
    assert all(isfinite(cost.bandwidth_bps) for cost in pairs.values())
