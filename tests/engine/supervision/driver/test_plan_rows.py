"""The rows that the driver reads are those that the ranks run."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.engine.planning.given import given_facts
from tests.engine.tiny import tiny_config
from weft.conf.schema import LinkConfig
from weft.engine.layout import RankLayout
from weft.engine.planning.plan_file import ReplicaPlans, plan_to_json
from weft.engine.planning.run_plan import plan_run
from weft.engine.supervision.driver.culprit import read_rows


def plan_of(sites, replicas, cell=1, **keywords):
    config = tiny_config(stages=sum(sites), layers=4, cell=cell, **keywords, **({"sites": sites} if sites[1:] else {}))
    names = [site.name for site in config.cluster.sites]
    config.cluster.links = [LinkConfig(sites=[a, b], latency_ms=1, bandwidth_mbps=200) for a, b in pairwise(names)]
    return plan_run(config, given_facts(RankLayout(sites, replicas)))


@pytest.mark.parametrize(
    "plan, cells",
    [
        (lambda: plan_of((2,), 1), ()),
        (lambda: plan_of((2,), 3, schedule="zbv", placement="fold", zero=2), ()),
        (lambda: plan_of((1, 1), 2), ()),
        (lambda: plan_of((1, 1), 5, cell=2, zero=1), ((0, 1), (2, 3))),
        (lambda: plan_of((1, 1), 5, cell=3, schedule="auto", placement="any"), ((0, 1, 2), (3, 4))),
    ],
)
def test_every_rank_has_its_row(plan, cells):
    plan = plan()
    rows = read_rows(plan_to_json(plan))
    assert rows.cells == cells
    assert sorted(rows.seats) == list(range(plan.layout.world_size))
    for rank, (replica, row) in rows.seats.items():
        at = plan.layout.position(rank)
        assert (replica, row) == (at.replica, at.stage)
        assert rows.row(rank) == plan.row(rank)
        assert rows.replicas[replica].schedule.placement == plan.placement


def test_replicas_with_moved_micro_batches_have_rows_of_their_own():
    plan = plan_of((2,), 3, schedule="auto", microbatches=4)
    schedules = tuple(plan.schedules_for(tiny_config(stages=2, layers=4), count)[1] for count in (2, 5))
    costs = [replace(plan.costs, host=replace(plan.costs.host, latency_s=slow)) for slow in (1.0, 0.0)]
    run = (costs[1], costs[0], costs[1])
    replicas = ReplicaPlans(step=7, schedules=schedules, counts=(5, 2, 5), costs=run)
    text = plan_to_json(plan, replicas)
    rows = read_rows(text)
    for rank, (replica, row) in rows.seats.items():
        assert rows.row(rank) == schedules[replicas.counts[replica] == 5].rows[row]
    tree = json.loads(text)
    assert [member["costs"] for member in tree["members"]] == [0, 1, 0] and len(tree["measured_costs"]) == 2


def test_replicas_that_run_the_same_share_it():
    rows = read_rows(plan_to_json(plan_of((1, 1), 4, cell=2)))
    schedules = [id(replica.schedule) for replica in rows.replicas]
    assert schedules[:2] == schedules[2:] and schedules[0] != schedules[1]


@pytest.mark.parametrize("change", [{"ranks": None}, {"schedules": {"1": {}}}, {"placement": {}}, {"members": [5]}])
def test_what_is_no_plan_is_refused(change):
    tree = json.loads(plan_to_json(plan_of((2,), 1)))
    for text in ("", "[]", json.dumps(tree | change)):
        with pytest.raises(ValueError, match="not a plan"):
            read_rows(text)
