"""The list scheduler's decisions, each looked at again from its rows and from when their slots ran."""

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest

from tests.pipeline.pair_costs import scaled
from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators.auto_greedy import ListScheduler, Rule
from weft.pipeline.generators.auto_problem import NONE, Problem
from weft.pipeline.generators.auto_timing import time_rows
from weft.pipeline.placement import Placement

TICK_S = 2.0**-20
PLACEMENTS = [
    Placement.straight(4, (2, 2)),
    Placement.fold(3, sites=(1, 2)),
    Placement.interleaved(3, 2, (2, 1)),
    Placement.site_fold((2, 1)),
]


def uneven(placement, random, send_s=0.0):
    """Durations of which hardly two are equal, so that no two events fall together."""
    stages = tuple(
        StageCost(
            forward_s=random.uniform(0.2, 3),
            input_s=random.uniform(1, 3),
            weight_s=random.uniform(1, 3),
            activation_bytes=random.randint(1, 4),
            output_bytes=random.randint(1, 3),
            send_s=send_s,
        )
        for _ in range(placement.num_stages)
    )
    local = LinkCost(latency_s=random.uniform(0, 1), bandwidth_bps=8 / random.uniform(0.1, 0.5))
    wan = LinkCost(
        latency_s=random.uniform(0, 3), bandwidth_bps=8 / random.uniform(0.5, 2), pair_bps=random.choice([inf, 3])
    )
    return CostModel(stages=stages, local=local, wan=wan)


def random_rule(problem, random, **how):
    by_stage = tuple(tuple(random.uniform(0, 20) for _ in range(3)) for _ in range(problem.placement.num_stages))
    return Rule(priority_s=by_stage, pace_s=random.uniform(0, 8), **({"wait_share": 0.0} | how))


def priority_s(problem, rule, node):
    stage, rest = divmod(node, problem.nodes_per_stage)
    kind, microbatch = divmod(rest, problem.num_microbatches)
    return rule.priority_s[stage][kind] + rule.pace_s * microbatch


class OneRank:
    """A rank with all stages, implemented again without nodes or queues: by counts of what is done of each stage."""

    def __init__(self, problem, rule, cap_bytes):
        self.problem, self.rule, self.cap_bytes = problem, rule, cap_bytes
        self.legs = problem.placement.num_stages
        self.saved = [(cost.activation_bytes, cost.weight_saved_bytes) for cost in problem.costs.stages]
        self.done = {(op, stage): 0 for stage in range(self.legs) for op in (Op.F, Op.I, Op.W)}

    @property
    def held(self):
        """Bytes of forwards without their input gradient, and of input gradients without that of the weights."""
        done = self.done
        return sum(
            first * (done[Op.F, stage] - done[Op.I, stage]) + second * (done[Op.I, stage] - done[Op.W, stage])
            for stage, (first, second) in enumerate(self.saved)
        )

    def fits(self, stage):
        """True if one forward more leaves space for every micro-batch, the oldest first, to make its other forwards."""
        made = [self.done[Op.F, one] + (one == stage) for one in range(self.legs)]
        rest = [
            sum(
                first * max(0, number - oldest, 1 if number <= oldest else 0)
                for number, (first, _) in zip(made, self.saved, strict=True)
            )
            for oldest in range(made[-1], made[0])
        ]
        return max([self.held + self.saved[stage][0], *rest]) <= self.cap_bytes

    def ready(self):
        """Return the actions that may start, as (priority, action), by priority."""
        found = []
        for (op, stage), number in self.done.items():
            needs = {
                Op.F: [(Op.F, stage - 1)] if stage else [],
                Op.I: [(Op.I, stage + 1) if stage + 1 < self.legs else (Op.F, stage)],
                Op.W: [(Op.I, stage)],
            }[op]
            if number < self.problem.num_microbatches and all(self.done[need] > number for need in needs):
                action = Action(op, stage, number)
                if op is not Op.F or self.fits(stage):
                    found.append((priority_s(self.problem, self.rule, self.problem.node(action)), action))
        return sorted(found, key=lambda one: one[0])

    def next(self):
        """The slot that comes next."""
        ready = [action for _, action in self.ready()]
        first = ready[0]
        if self.rule.pair and first.op is not Op.W:
            other = next((one for one in ready if {one.op, first.op} == {Op.F, Op.I}), None)
            if other is not None:
                forward, backward = sorted((first, other), key=lambda action: action.op is Op.I)
                deferred = self.done[Op.I, backward.stage] - self.done[Op.W, backward.stage]
                if self.rule.pair is Op.B and not deferred:
                    backward = backward._replace(op=Op.B)
                node = self.problem.pair(self.problem.node(forward), self.problem.node(backward))
                if forward.microbatch != backward.microbatch and self.held + self.problem.start_bytes[node] <= (
                    self.cap_bytes
                ):
                    return forward, backward
        if first.op is Op.I and self.held + self.saved[first.stage][1] > self.cap_bytes:
            return (next((one for one in ready if one.op is Op.W), first._replace(op=Op.B)),)
        return (first,)

    def row(self):
        slots = []
        while any(number < self.problem.num_microbatches for number in self.done.values()):
            slots.append(self.next())
            for op, stage, _ in slots[-1]:
                for part in (Op.I, Op.W) if op is Op.B else (op,):
                    self.done[part, stage] += 1
        return slots


@pytest.mark.parametrize("pair", [None, Op.I, Op.B])
@pytest.mark.parametrize(("seed", "legs"), product(range(8), (1, 2, 3)))
def test_one_rank_takes_what_comes_first_of_what_its_cap_can_finish(seed, legs, pair):
    random, count = Random(seed), 5
    placement = Placement.fold(1, legs)
    costs = replace(uneven(placement, random), pairs=scaled(0.7 if pair else 1))
    stages = tuple(replace(stage, weight_saved_bytes=random.randint(0, 3)) for stage in costs.stages)
    problem = Problem(placement, count, replace(costs, stages=stages), tick_s=TICK_S)
    rule = random_rule(problem, random, pair=pair)
    whole = sum(stage.activation_bytes for stage in stages)
    cap = whole + random.randint(0, 2 * whole)
    scheduler = ListScheduler(problem, rule, cap)
    makespan_s = scheduler.run()
    (row,) = scheduler.rows
    assert [problem.slot(node) for node in row] == OneRank(problem, rule, cap).row()
    assert makespan_s == sum(problem.seconds[node] for node in row)
    assert len(scheduler.finished_s) == count


@pytest.mark.parametrize(
    ("arrives_s", "input_priority_s", "waits"), [(9.0, 0.0, True), (10.0, 0.0, False), (9.0, 2.0, False)]
)
def test_a_rank_waits_for_what_comes_sooner_and_first_but_not_for_its_equal(arrives_s, input_priority_s, waits):
    """At 8 s a forward of 4 s may wait for 2 s: a gradient has to come before 10 s, and to go before it."""
    placement = Placement.straight(2)
    stages = (
        StageCost(forward_s=4, input_s=1, weight_s=1, activation_bytes=1, output_bytes=0),
        StageCost(forward_s=2, input_s=arrives_s - 8, weight_s=1, activation_bytes=1, output_bytes=0),
    )
    problem = Problem(placement, 3, CostModel(stages=stages, local=LinkCost(latency_s=1)))
    rule = Rule(priority_s=((2.0, input_priority_s, 9.0), (5.0, 0.0, 9.0)), pace_s=0.0, wait_share=0.5)
    scheduler = Watched(problem, rule, inf)
    scheduler.run()
    third, gradient = problem.node(Action(Op.F, 0, 2)), problem.node(Action(Op.I, 0, 0))
    assert scheduler.start_s[gradient if waits else third] == (arrives_s if waits else 8.0)
    assert (scheduler.rows[0].index(gradient) < scheduler.rows[0].index(third)) == waits


class Watched(ListScheduler):
    """It remembers when it started what."""

    def __init__(self, problem, rule, cap_bytes):
        super().__init__(problem, rule, cap_bytes)
        self.start_s = {}

    def _start(self, rank, nodes, now_s):
        self.start_s[nodes[0]] = now_s
        super()._start(rank, nodes, now_s)


class Hindsight:
    """The actions that a rank could have started, derived from what started when."""

    def __init__(self, problem, rule, start_s, backlog=inf, backlog_of_gradients=False):
        self.problem, self.rule, self.start_s = problem, rule, start_s
        self.backlog, self.of_gradients = backlog, backlog_of_gradients
        self.end_s = {node: at_s + problem.seconds[node] for node, at_s in start_s.items()}
        self.arrival_s, self.link_free_s, self.pair_free_s = {}, {}, {}
        links, pairs = ({NONE: 0.0} | dict.fromkeys(of, 0.0) for of in (problem.link, problem.pair_link))
        for node in sorted(self.end_s, key=self.end_s.__getitem__):
            link, pair = problem.link[node], problem.pair_link[node]
            sent_s = max(self.end_s[node], links[link], pairs[pair]) if link != NONE else self.end_s[node]
            links[link] = self.link_free_s[node] = sent_s + problem.occupancy_s[node]
            if pair != NONE:
                pairs[pair] = self.pair_free_s[node] = sent_s + problem.transit_s[node]
            self.arrival_s[node] = sent_s + problem.transit_s[node] + problem.latency_s[node]

    def room_s(self, node, before):
        """When a node may start so that no more is queued on its links, once it ends, than its rule allows."""
        problem, backlog, room_s = self.problem, self.backlog, [0.0]
        for one in before:
            if problem.link[one] == problem.link[node] != NONE:
                room_s.append(self.link_free_s[one] - backlog * problem.occupancy_s[node] - problem.seconds[node])
            if problem.pair_link[one] == problem.pair_link[node] != NONE:
                room_s.append(self.pair_free_s[one] - backlog * problem.transit_s[node] - problem.seconds[node])
        return max(room_s)

    def may_start_s(self, node, before, now_s):
        """When a node may start, as far as that is known by now; inf if not."""
        problem, need = self.problem, self.problem.remote_need[node]
        if set(problem.local_needs(node)) - set(before):
            return inf
        if need != NONE and self.start_s[need] >= now_s:
            return inf
        start_s = 0.0 if need == NONE else self.arrival_s[need]
        held_back = problem.op(node) is Op.F or (problem.op(node) is Op.I and self.of_gradients)
        return max(start_s, self.room_s(node, before)) if held_back and self.backlog < inf else start_s

    def decision(self, row, index, now_s):
        """Return the next node of a rank that has done a part of its row, or None while it waits."""
        before, problem = row[:index], self.problem
        following = {
            node - node % problem.num_microbatches: node for node in sorted(set(row) - set(before), reverse=True)
        }
        may_s = {node: self.may_start_s(node, before, now_s) for node in following.values()}
        ready = [(priority_s(problem, self.rule, node), node) for node, at_s in may_s.items() if at_s <= now_s]
        if not ready:
            return None
        least, node = min(ready)
        until_s = now_s + self.rule.wait_share * problem.seconds[node]
        better = [
            other for other, at_s in may_s.items() if at_s < until_s and priority_s(problem, self.rule, other) < least
        ]
        return None if better else node

    def moments(self, row, index, free_s):
        """When a rank looks for something to start, from when it is free until it starts its next."""
        problem, start_s = self.problem, self.start_s[row[index]]
        known = {self.arrival_s[problem.remote_need[n]] for n in row if problem.remote_need[n] != NONE}
        held = {self.may_start_s(node, row[:index], inf) for node in row[index:]}
        return [free_s, *sorted(at_s for at_s in known | held if free_s < at_s <= start_s)]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"wait_share": 0.6},
        {"backlog": 0.0},
        {"backlog": 0.5, "wait_share": 0.4},
        {"backlog": 0.3, "backlog_of_gradients": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda one: f"{one.legs}{one.groups}")
def test_every_rank_starts_what_comes_first_and_waits_as_long_as_its_rule_says(placement, how):
    random = Random(str(how))
    for _ in range(4):
        problem = Problem(
            placement, 5, uneven(placement, random, random.choice([0.0, 0.25])), until_weight=True, tick_s=TICK_S
        )
        rule = random_rule(problem, random, **({"wait_share": 0.0} | how))
        scheduler = Watched(problem, rule, inf)
        makespan_s, rows = scheduler.run(), scheduler.rows
        limits = {name: value for name, value in how.items() if name != "wait_share"}
        seen = Hindsight(problem, rule, scheduler.start_s, **limits)
        assert makespan_s == max(seen.end_s[row[-1]] + problem.send_s[row[-1]] for row in rows)
        if "backlog" not in how:
            assert time_rows(problem, rows).makespan_s == makespan_s
        firsts = [seen.end_s[node] for node in rows[0] if problem.op(node) is Op.I and problem.rank(node) == 0]
        assert set(scheduler.finished_s) <= set(firsts) and len(scheduler.finished_s) == 5
        for row in rows:
            assert len(row) == len(set(row)) == 3 * 5 * len(placement.legs)
            free_s = 0.0
            for index, node in enumerate(row):
                moments = seen.moments(row, index, free_s)
                assert [seen.decision(row, index, at_s) for at_s in moments] == [None] * (len(moments) - 1) + [node]
                free_s = seen.end_s[node] + problem.send_s[node]
