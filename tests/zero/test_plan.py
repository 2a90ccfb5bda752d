"""The engine issues the collectives of the overlap plan, chunk by chunk and in its order."""

from itertools import pairwise

import pytest

from weft.comm.collectives import AlphaBeta, CollectiveCosts, Group, LinkClass
from weft.conf.schema import PipelineConfig, ScheduleKind, ZeroConfig
from weft.engine.emulation import EmulatedStage, EmulatedWork
from weft.engine.overlap import ZeroWork, plan_overlap
from weft.engine.zero import Collectives, Sharding
from weft.engine.zero.collectives import Done
from weft.pipeline.action import Action, Op
from weft.pipeline.placement import Placement

LAYERS, ELEMENTS = 8, 1024
WORK = EmulatedWork(forward_s=0, input_s=0, weight_s=0, hidden_bytes=64, weight_elements=ELEMENTS)
TIMED = EmulatedWork(forward_s=1e-3, input_s=1e-3, weight_s=1e-3, hidden_bytes=64, weight_elements=ELEMENTS)
GROUPS = {"one node": Group.regular(1, 4), "two nodes": Group.regular(2, 2)}


class Recorded(Collectives):
    """The first of four replicas: notes what is started, and ends it at once with its own part alone."""

    def __init__(self):
        super().__init__(num_replicas=4)
        self.started = []

    def _start(self, over, primitive, source, target):
        self.started.append((primitive, max(source.numel(), target.numel())))
        if target.numel() < source.numel():
            target.copy_(source[: target.numel()])
        return Done(target)


def planned(group, zero_stage, num_stages, bytes_per_s):
    links = {LinkClass.intra: AlphaBeta(1e-6, 1e-10), LinkClass.inter: AlphaBeta(1e-5, 1 / bytes_per_s)}
    work = ZeroWork(
        zero_stage=zero_stage,
        group=group,
        costs=CollectiveCosts.of_links(links),
        elements=(LAYERS // num_stages * ELEMENTS,) * num_stages,
    )
    placement = Placement.interleaved(1, num_stages) if num_stages > 1 else Placement.straight(1)
    return plan_overlap(work, TIMED.costs(LAYERS, num_stages), placement, 2)


@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 1e10])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize(("nodes", "num_stages"), [("one node", 1), ("two nodes", 1), ("two nodes", 2)])
def test_a_step_issues_what_is_planned(nodes, zero_stage, num_stages, bytes_per_s):
    plan = planned(GROUPS[nodes], zero_stage, num_stages, bytes_per_s)
    collectives = Recorded()
    stages = [EmulatedStage(WORK, index=i, num_layers=LAYERS, num_stages=num_stages) for i in range(num_stages)]
    sharding = Sharding(stages, ZeroConfig(stage=zero_stage), collectives, cuts=plan.cuts)
    forwards = [Action(Op.F, stage.index, m) for stage in stages for m in range(2)]
    backwards = [Action(Op.B, stage.index, m) for stage in reversed(stages) for m in range(2)]
    sharding.begin_step([*forwards, *backwards])
    outputs = {}
    for action in forwards:
        with sharding.around(action):
            outputs[action.stage, action.microbatch] = stages[action.stage](None, {}).sum()
    for action in backwards:
        with sharding.around(action):
            outputs[action.stage, action.microbatch].backward()
        if action.microbatch == 1:
            sharding.reduce(action.stage)
    sharding.finish_gradients()
    sharding.publish()
    issued = [[(c.primitive, c.dims[0]) for c in stage.issued()] for stage in plan.stages]
    reductions = [line[: len(stage.cuts) + 1] for line, stage in zip(issued, plan.stages, strict=True)]
    gathers = [line[len(stage.cuts) + 1 :] for line, stage in zip(issued, plan.stages, strict=True)]
    assert collectives.started == [c for part in (*reversed(reductions), *gathers) for c in part]


def test_slow_links_are_cut_for_and_fast_ones_are_not():
    slow, fast = (planned(GROUPS["two nodes"], 1, 2, rate).stages for rate in (1e5, 1e10))
    assert slow[0].cuts and slow[1].cuts
    assert not fast[1].cuts, "the other stage's compute covers it"
    ends = [0.0, *slow[0].cuts, 1.0]
    assert all(begin < end for begin, end in pairwise(ends))


def test_the_schedule_launches_as_many_together_as_memory_allows():
    plan = planned(GROUPS["two nodes"], 1, 2, 1e5)
    interleaved = PipelineConfig(schedule=ScheduleKind["interleaved"], memory_cap_bytes=1 << 20)
    assert plan.together == 2
    assert plan.obeyed_by(interleaved).launch_together == 2
    for other in (
        PipelineConfig(schedule=ScheduleKind["interleaved"]),
        PipelineConfig(schedule=ScheduleKind["interleaved"], memory_cap_bytes=1, launch_together=4),
        PipelineConfig(memory_cap_bytes=1),
    ):
        assert plan.obeyed_by(other) is other
