"""A schedule that is planned again while training: all ranks change at one step, and nothing else changes."""

from dataclasses import replace
from itertools import pairwise, product
from math import inf
from random import Random

import pytest

from tests.engine.planning.adapted import CHANGED_AFTER, die_while_planning, train_recovering, train_three
from tests.engine.tiny import tiny_config
from weft.conf.schema import PipelineConfig, ScheduleKind
from weft.engine.planning.layer_moves import balanced_layers, largest
from weft.engine.planning.replanning import LEAST_GAIN, Replanning, Request, Restart, propose
from weft.engine.planning.schedules import plan_schedule
from weft.engine.planning.spreads import with_jitter
from weft.pipeline.costs import CostModel
from weft.pipeline.jitter import MOST_JITTER
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.tools.ranks import run_ranks


def adaptive(stages=2, **keywords):
    config = tiny_config("auto", "fold" if stages > 1 else "straight", stages=stages, microbatches=4, **keywords)
    config.pipeline.adapt, config.pipeline.adapt_steps = True, 2
    return config


@pytest.fixture(scope="module")
def ranks():
    """Results of each rank: adapted, with a killed planner, without adaptation."""
    return run_ranks(2, train_three, adaptive(), timeout_s=100)


@pytest.mark.slow
def test_all_ranks_change_to_the_new_schedule_at_one_step(ranks):
    adapted = [rank[0] for rank in ranks]
    changes = [[a != b for a, b in pairwise(r["schedules"])].index(True) for r in adapted]
    assert len(set(changes)) == 1 and changes[0] >= CHANGED_AFTER
    assert adapted[0]["schedules"] == adapted[1]["schedules"]
    assert [run["proposals"] for run in adapted] == [[(changes[0] + 1, "schedule")]] * 2


@pytest.mark.slow
def test_losses_are_those_of_a_run_that_does_not_adapt(ranks):
    adapted, killed, plain = ranks[0]
    assert adapted["losses"] == plain["losses"] == killed["losses"]
    assert plain["schedules"][0] != adapted["schedules"][-1]


@pytest.mark.slow
def test_boards_publish_the_work_of_the_new_schedule_once(ranks):
    for rank in ranks:
        adapted, killed, plain = rank
        assert len(adapted["published"]) == 1 and not killed["published"] and not plain["published"]
        assert adapted["published"][0] == [pytest.approx(span) for span in adapted["compute"]]
    assert ranks[0][0]["published"] != ranks[1][0]["published"]


@pytest.mark.slow
def test_no_rank_saves_more_than_the_fullest_rank_of_the_first_schedule(ranks):
    adapted, _, plain = ranks[0]
    assert adapted["peak"] <= plain["peak"]


@pytest.mark.slow
def test_a_killed_planner_leaves_the_schedule(ranks):
    killed = [rank[1] for rank in ranks]
    assert all(run["schedules"][0] == run["schedules"][-1] and not run["proposals"] for run in killed)


@pytest.mark.slow
def test_a_rank_that_dies_during_planning_ends_the_run_and_the_planner():
    error, left = run_ranks(2, die_while_planning, adaptive(), timeout_s=60)
    assert left == "left" and error


@pytest.mark.slow
def test_a_rank_that_recovers_before_the_checkpoint_keeps_its_layers(tmp_path):
    found, _ = run_ranks(2, train_recovering, adaptive(), str(tmp_path), timeout_s=240)
    planned = next(place for place, each in enumerate(found) if each is not None)
    assert any(name.startswith("pipeline.layers=") for name in found[planned].arguments)
    assert found[:planned] == [None] * planned and found[-1] is None


def request_of(factors, cap=2.0, placement="straight", replicas=1, obstacle="", ranks=2, **settings):
    """Ranks of unit stages, of which the first of replica 0 takes ``factors`` times as long in F, I and W."""
    placed = Placement.named(placement, ranks, (ranks,), 2)
    usual = CostModel.unit(placed.num_stages)
    config = PipelineConfig(
        stages=ranks,
        schedule=ScheduleKind["auto"],
        microbatches=6,
        search_seconds=0.1,
        memory_cap_bytes=cap,
        **settings,
    )
    forward_s, input_s, weight_s = factors
    slow = replace(usual.stages[0], forward_s=forward_s, input_s=input_s, weight_s=weight_s)
    return Request(
        config=config,
        schedules=(plan_schedule(config, placed, costs=usual),),
        counts=(6,) * replicas,
        measured=(replace(usual, stages=(slow, *usual.stages[1:])), *(usual,) * (replicas - 1)),
        usual=(usual,) * replicas,
        layers=(4,) * placed.num_stages,
        fixed=(0.0,) * placed.num_stages,
        zero_stage=0,
        obstacle=obstacle,
    )


@pytest.mark.parametrize("factors", [(4.0, 0.2, 0.2), (1.43, 1.43, 1.43), (0.2, 0.2, 4.0), (1.0, 1.0, 1.0)])
def test_the_chosen_level_is_the_shortest_that_weft_carries_out(factors):
    request = request_of(factors)
    found = propose(request)
    steps = {level.name: level.step_s for level in found.levels}
    (costs,), (schedule,) = request.measured, found.schedules
    assert steps["none"] == simulate(request.schedules[0], costs).step_s
    assert (found.chosen == "schedule") == (steps["schedule"] <= (1 - LEAST_GAIN) * steps["none"])
    assert simulate(schedule, costs).step_s == steps[found.chosen] == found.step_s()
    assert peak_bytes(schedule, costs) <= request.config.memory_cap_bytes
    assert propose(request) == found
    assert found.text().count("chosen") == 1


@pytest.mark.parametrize("factor", [1e-9, 1e-3, 3600.0, 1e9])
@pytest.mark.parametrize(("replicas", "samples"), [(1, 0), (3, 0), (2, 4)])
def test_levels_have_finite_prices_however_extreme_the_measured_costs_are(factor, replicas, samples):
    request = request_of((factor,) * 3, replicas=replicas, cap=6.0)
    jittery = (with_jitter(costs, (MOST_JITTER, 0.0), (), 1) for costs in request.measured)
    config = replace(request.config, jitter_samples=samples)
    found = propose(replace(request, config=config, measured=tuple(jittery)))
    levels = {level.name: level.step_s for level in found.levels}
    assert all(0.0 < step_s < inf for step_s in levels.values()) and {"none", "schedule", "evict"} <= {*levels}
    assert found.step_s() <= levels["none"] and sum(found.counts) == 6 * replicas and min(found.counts) >= 1


def test_another_process_finds_the_same_plan():
    request = request_of((4.0, 0.2, 0.2))
    planning = Replanning(request)
    assert planning.result() == propose(request)


def test_a_plan_that_fails_is_reported_with_its_reason():
    impossible = request_of((1.0, 1.0, 1.0))
    impossible = replace(impossible, config=replace(impossible.config, memory_cap_bytes=0.5))
    with pytest.raises(ValueError, match=r"pipeline\.memory_cap_bytes=0\.5: one micro-batch alone"):
        Replanning(impossible).result()


def divided(request, **keywords):
    return balanced_layers(largest(request.measured), request.layers, request.fixed, request.placement, **keywords)


def test_layers_move_away_from_a_slow_rank():
    request = request_of((2.0, 2.0, 2.0), replicas=3)
    assert divided(request) == (3, 5)
    assert divided(replace(request, fixed=(0.9, 0.0))) == (1, 7)
    assert divided(request, fits=lambda counts: max(counts) < 5) == (4, 4)
    moved = replace(request, moved=(3, 5))
    steps = {level.name: level.step_s for level in propose(moved).levels}
    assert steps["layers"] < steps["schedule"] and steps["evict"] < steps["none"]
    seconds = [stage.compute_s for stage in propose(moved).moved_costs.stages]
    assert seconds == [pytest.approx(6.0 * 3 / 4), pytest.approx(3.0 * 5 / 4)]


def test_numbers_of_layers_are_the_best_that_one_could_set():
    random = Random(0)
    for _ in range(50):
        placement = random.choice(["straight", "fold"])
        request = request_of([random.uniform(0.3, 3.0)] * 3, placement=placement)
        layers = tuple(random.randint(1, 4) for _ in request.layers)
        fixed = (random.choice([0.0, 0.3]),) * len(layers)
        pairs = zip(request.measured[0].stages, request.placement.stage_ranks, layers, strict=True)
        slow = request.measured[0].stages[0]
        stages = tuple(scaled(stage if rank else slow, count) for stage, rank, count in pairs)
        measured = (replace(request.measured[0], stages=stages),)
        request = replace(request, measured=measured, layers=layers, fixed=fixed)
        choices = (each for each in product(range(1, sum(layers)), repeat=len(layers)) if sum(each) == sum(layers))
        assert busiest_s(request, divided(request)) == pytest.approx(min(busiest_s(request, each) for each in choices))


def scaled(stage, count):
    """Return the costs of a stage of ``count`` layers of one stage each."""
    names = ("forward_s", "input_s", "weight_s")
    return replace(stage, **{name: count * getattr(stage, name) for name in names})


def busiest_s(request, counts):
    """Return the seconds that a micro-batch takes on the busiest rank with other numbers of layers."""
    stages = zip(request.measured[0].stages, request.fixed, request.layers, counts, strict=True)
    seconds = [stage.compute_s * (fixed + (1.0 - fixed) * new / old) for stage, fixed, old, new in stages]
    return max(sum(seconds[stage] for stage in held) for held in request.placement.rank_stages)


@pytest.mark.parametrize(
    ("restart", "restarts", "why"),
    [
        (Restart(seconds=10.0, steps_left=1000), ("evict", "layers"), ""),
        (Restart(seconds=1e3, steps_left=9), (), "a restart takes 1e+03 s, and 9 steps are left"),
        (Restart(obstacle="checkpoint.every=0"), (), "checkpoint.every=0"),
    ],
)
def test_a_restart_must_be_possible_and_worth_its_price(restart, restarts, why):
    request = replace(request_of((2.0,) * 3, ranks=2), moved=(3, 5), has_slow_rank=True, restart=restart)
    found = propose(request)
    assert found.restarts == restarts
    (remark,) = (level.remark for level in found.levels if level.name == "layers")
    assert remark == f"pipeline.layers=[3, 5]; {f'not carried out: {why}' if why else 'at the next checkpoint'}"
    without = propose(replace(request, has_slow_rank=False))
    assert set(without.restarts) == {*restarts} - {"evict"}
