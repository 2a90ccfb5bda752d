"""Pairs in a run's plan: by segment plans if collectives inside of layers are known, otherwise none."""

from dataclasses import replace

import pytest
from pytest import approx
from transformers import LlamaConfig

from tests.engine.tiny import tiny_config
from weft.comm.collectives import AlphaBeta, CollectiveCosts, Group, LinkClass
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.values import decode, encode
from weft.conf.schema import PairChoice
from weft.engine.planning.facts import fact_kinds
from weft.engine.planning.gathering import facts_before_start
from weft.engine.planning.plan_file import plan_to_json
from weft.engine.planning.run_plan import RunPlan, plan_run
from weft.engine.strands import facts as strand_facts
from weft.pipeline.action import Op
from weft.pipeline.costs import StageCost
from weft.pipeline.profile import costs_to_yaml
from weft.pipeline.strands.pairs import pair_name, plans_for
from weft.pipeline.strands.segments import LinkScope

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
MODEL = LlamaConfig(**SHAPE, vocab_size=256, max_position_embeddings=512)
RANKS = 4
SLOW, FAST = AlphaBeta(1e-3, 1e-10), AlphaBeta(1e-9, 1e-15)


def run_of(tmp_path, schedule="w", *, link=SLOW, layout=(2,), **parallel):
    """A fold of two ranks, each a tensor group of two."""
    config = tiny_config(schedule, "fold", stages=2, microbatches=8)
    config.parallel.tensor = 2
    for name, value in parallel.items():
        setattr(config.parallel, name, value)
    config.data.sequence_length, config.train.microbatch_size = 256, 2
    config.cluster.ranks = RANKS
    config.data.cache_dir = str(tmp_path / "cache")
    if link is not None:
        group = Group(tuple(range(sum(layout))), tuple(n for n, held in enumerate(layout) for _ in range(held)))
        costs = CollectiveCosts.of_links(dict.fromkeys((LinkClass.intra, LinkClass.inter), link))
        CostCache.in_folder(config.data.cache_dir).write(topology_key(group, "cpu"), costs)
    return config


def planned(config):
    return plan_run(config, facts_before_start(config, MODEL))


def plans_of(plan):
    return plans_for(plan.schedules.values(), plan.costs.pairs, plan.placement.num_stages)


def pairs_of(plan):
    return [slot for row in plan.schedule().rows for slot in row if len(slot) == 2]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("schedule", ["w", "auto"])
def test_pairs_are_planned_where_they_gain(tmp_path, schedule):
    config = run_of(tmp_path, schedule)
    plan = planned(config)
    segments = plans_of(plan)
    assert pairs_of(plan) and set(segments) == {pair_name(slot) for slot in pairs_of(plan)}
    for slot in pairs_of(plan):
        forward, backward = (plan.costs.pairs.stages[action.stage] for action in slot)
        pair = forward.beside(backward)
        segments[pair_name(slot)].check(pair if slot[1].op is Op.B else replace(pair, weights=()))
        assert plan.costs.pair_s(*slot) < sum(plan.costs.stages[action.stage].seconds(action.op) for action in slot)
    config.pipeline.pairs = PairChoice.never
    alone = planned(config)
    assert not pairs_of(alone) and alone.costs.pairs is None
    assert plan.step_s < alone.step_s


def test_where_collectives_take_no_time_nothing_is_paired(tmp_path):
    plan = planned(run_of(tmp_path, "auto", link=FAST))
    assert not pairs_of(plan)
    assert plan.costs.pairs is not None and plan.costs.least_pair_scale(range(4)) >= 1


def test_where_collectives_are_not_known_nothing_is_paired_and_the_source_says_so(tmp_path):
    config = run_of(tmp_path, link=None)
    facts = facts_before_start(config, MODEL)
    assert facts.strands is None and "not measured; `weft profile`" in facts.sources["axes"]
    assert not pairs_of(plan_run(config, facts))


def test_always_keeps_what_the_generator_pairs(tmp_path):
    config = run_of(tmp_path, link=FAST)
    config.pipeline.pairs = PairChoice.always
    assert pairs_of(planned(config))


def test_every_rank_that_knows_the_facts_plans_the_same(tmp_path):
    config = run_of(tmp_path, "auto")
    config.pipeline.search_seconds = 0.0
    facts = facts_before_start(config, MODEL)
    mine, theirs = plan_run(config, facts), plan_run(config, decode(encode(facts), fact_kinds()))
    assert mine.schedules == theirs.schedules and mine.costs == theirs.costs
    sent = decode(encode(mine), (RunPlan, *fact_kinds()))
    assert plans_of(sent) == plans_of(mine)
    assert '"strands"' in plan_to_json(mine)


def test_stages_cost_what_their_strands_do(tmp_path):
    plan = planned(run_of(tmp_path))
    for stage, strands in zip(plan.costs.stages, plan.costs.pairs.stages, strict=True):
        whole = strands.whole
        assert stage.forward_s == approx(whole.forward.compute_s + whole.forward.comm_s)
        assert stage.input_s + stage.weight_s + stage.forward_s == approx(whole.sequential_s)


def test_ranks_of_several_hosts_communicate_between_them(tmp_path):
    config = run_of(tmp_path, layout=(1, 1), tensor_across_hosts=True)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"host{n} slots=1\n" for n in range(RANKS)))
    config.cluster.hostfile, config.cluster.ranks = str(hostfile), 0
    pairs = planned(config).costs.pairs
    links = {segment.link for stage in pairs.stages for segment in stage.whole.forward.segments}
    assert links - {None} == {LinkScope.between_hosts}


def test_measured_stages_scale_what_was_traced(tmp_path):
    config = run_of(tmp_path)
    first = planned(config).costs
    slower = tuple(
        StageCost(forward_s=2 * s.forward_s, input_s=2 * s.input_s, weight_s=2 * s.weight_s, activation_bytes=1)
        for s in first.stages
    )
    path = tmp_path / "costs.yaml"
    path.write_text(costs_to_yaml(replace(first, stages=slower, pairs=None)))
    config.pipeline.costs_file = str(path)
    costs = planned(config).costs
    measured_s = sum(stage.forward_s + stage.input_s + stage.weight_s for stage in slower)
    assert sum(stage.whole.sequential_s for stage in costs.pairs.stages) == approx(measured_s)
    assert sum(s.whole.comm_s for s in costs.pairs.stages) == approx(sum(s.whole.comm_s for s in first.pairs.stages))


def test_strands_in_a_costs_file_are_taken(tmp_path):
    config = run_of(tmp_path)
    first = planned(config).costs
    path = tmp_path / "costs.yaml"
    path.write_text(costs_to_yaml(first))
    config.pipeline.costs_file = str(path)
    config.data.cache_dir = str(tmp_path / "nothing")
    again = planned(config).costs
    for stage in range(4):
        assert again.pairs.plan(stage, stage) == first.pairs.plan(stage, stage)


def test_a_model_that_cannot_be_traced_is_trained_without_pairs(tmp_path, monkeypatch, caplog):
    def fails(*_, **__):
        raise ValueError("no data")

    monkeypatch.setattr(strand_facts, "trace_strands", fails)
    plan = planned(run_of(tmp_path))
    assert plan.costs.pairs is None and not pairs_of(plan)
    assert "strand pairs are not planned: no data" in caplog.text
