"""The engine issues the collectives of the overlap plan, bucket by bucket and in its order."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from benchmarks.peers.emulated_stage import EmulatedStage, EmulatedWork
from tests.comm.collectives.balanced import regular
from tests.engine.zero.replicas import SmallStage
from weft.comm.channel import Completed
from weft.comm.collectives import AlphaBeta, CollectiveCosts, LinkClass, Primitive
from weft.conf.schema import PipelineConfig, ScheduleKind, WeftConfig, ZeroConfig
from weft.engine.planning.memory import activation_memory
from weft.engine.planning.overlap import OverlapPlan, ZeroWork, plan_overlap
from weft.engine.planning.schedules import open_placements, plan_schedule
from weft.engine.stages.cutting.split import StageSplit
from weft.engine.zero import Collectives, Sharding
from weft.pipeline.action import Action, Op
from weft.pipeline.memory import peak_bytes, zero_memory
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.pipeline.tiers import LayerCosts, layer_tier

LAYERS, ELEMENTS = 8, 1024
WORK = EmulatedWork(forward_s=0, input_s=0, weight_s=0, hidden_bytes=64, weight_elements=ELEMENTS)
TIMED = EmulatedWork(forward_s=1e-3, input_s=1e-3, weight_s=1e-3, hidden_bytes=64, weight_elements=ELEMENTS)
GROUPS = {"one node": regular(1, 4), "two nodes": regular(2, 2)}


class Recorded(Collectives):
    """The first of four replicas: notes what is started, and ends it at once with its own part alone."""

    def __init__(self):
        super().__init__(num_replicas=4)
        self.started = []

    def _start(self, over, primitive, source, target):
        self.started.append((primitive, max(source.numel(), target.numel())))
        if target.numel() < source.numel():
            target.copy_(source[: target.numel()])
        return Completed(target)


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


def issued_by(stage):
    """Return the collectives of a stage's step: reductions from the back on, then gathers from the front on.

    Chunks end at the parameters' ends that are nearest to the cuts; here they end at the cuts themselves. (At ZeRO
    stage 3 a block is gathered for each computation instead.)
    """

    def share(whole, part):
        size = whole.group.size
        return replace(whole, dims=(round(part * whole.dims[0] / size) * size,))

    chunks = list(pairwise((0.0, *stage.cuts, 1.0)))
    for begin, end in reversed(chunks):
        yield share(stage.reduce.choice.rewrite.collective, end - begin)
    for begin, end in chunks if stage.gather.choice.cost_s else ():
        yield share(stage.gather.choice.rewrite.collective, end - begin)


@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 1e10])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize(("nodes", "num_stages"), [("one node", 1), ("two nodes", 1), ("two nodes", 2)])
def test_a_step_issues_what_is_planned(nodes, zero_stage, num_stages, bytes_per_s):
    plan = planned(GROUPS[nodes], zero_stage, num_stages, bytes_per_s)
    collectives = Recorded()
    layers = StageSplit((LAYERS // num_stages,) * num_stages).layers
    stages = [EmulatedStage(WORK, index=i, layers=layers) for i in range(num_stages)]
    sharding = Sharding(stages, ZeroConfig(stage=zero_stage), collectives, bucket_ends=plan.cuts)
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
    issued = [[(c.primitive, c.dims[0]) for c in issued_by(stage)] for stage in plan.stages]
    reductions = [line[: len(stage.cuts) + 1] for line, stage in zip(issued, plan.stages, strict=True)]
    gathers = [line[len(stage.cuts) + 1 :] for line, stage in zip(issued, plan.stages, strict=True)]
    assert collectives.started == [c for part in (*reversed(reductions), *gathers) for c in part]


class HeadlessStage(SmallStage):
    """Its head is there and not used, so that the head's bucket waits for a gradient that does not come."""

    def forward(self, ids):
        hidden = self.embed(ids)
        return (hidden + self.layers[0](hidden)).sum()


def test_what_has_no_gradient_is_reduced_after_every_backward_but_the_last():
    collectives, stage = Recorded(), HeadlessStage(blocks=1)
    sharding = Sharding([stage], ZeroConfig(stage=2, reduce_every=1), collectives)
    row = [Action(op, 0, m) for m in range(3) for op in (Op.F, Op.B)]
    sharding.begin_step(row)
    counts = []
    for forward, backward in zip(row[::2], row[1::2], strict=True):
        with sharding.around(forward):
            output = stage(torch.tensor([[1, 2, 3]]))
        with sharding.around(backward):
            output.backward()
        counts.append(sum(primitive is Primitive.reduce_scatter for primitive, _ in collectives.started))
    sharding.reduce(0)
    sums = sum(primitive is Primitive.reduce_scatter for primitive, _ in collectives.started)
    buckets = len(sharding.trained)
    assert [*counts, sums] == [buckets, 2 * buckets, 3 * buckets - 1, 3 * buckets]


def test_slow_links_are_cut_for_and_fast_ones_are_not():
    slow, fast = (planned(GROUPS["two nodes"], 1, 2, rate).stages for rate in (1e5, 1e10))
    assert slow[0].cuts and slow[1].cuts
    assert not fast[1].cuts, "the other stage's compute covers it"
    ends = [0.0, *slow[0].cuts, 1.0]
    assert all(begin < end for begin, end in pairwise(ends))


def placement_of(config):
    (placement,) = open_placements(config).values()
    return placement


def test_the_schedule_launches_as_many_together_as_memory_allows():
    config = PipelineConfig(schedule=ScheduleKind["interleaved"], stages=1, microbatches=8)
    placement, costs = placement_of(config), TIMED.costs(LAYERS, 2)
    plan = replace(planned(GROUPS["two nodes"], 1, 2, 1e5), together=8)
    alike = replace(plan, stages=())  # no input gradients first
    by_hand = [plan_schedule(replace(config, launch_together=n), placement, costs=costs) for n in range(1, 9)]
    peaks = [peak_bytes(schedule, costs) for schedule in by_hand]
    assert peaks[0] < peaks[-1]
    for memory in (0, *peaks, 1e9):
        best = max((n for n, peak in enumerate(peaks) if peak <= memory), default=0)
        overlap = replace(alike, memory_bytes=memory)
        assert plan_schedule(config, placement, costs=costs, overlap=overlap) == by_hand[best]
    kept = replace(config, launch_together=3)
    assert plan_schedule(kept, placement, costs=costs, overlap=alike) == plan_schedule(kept, placement, costs=costs)


def gaining(stage):
    costs = LayerCosts(g_act=1, g_w=1, g_w_rs=3, others=4)
    return SimpleNamespace(stage=stage, layer=layer_tier(costs))


def test_input_gradients_go_first_where_the_layer_tier_gains_by_it():
    config = PipelineConfig(schedule=ScheduleKind["1f1b"], stages=4, microbatches=6)
    placement, costs = placement_of(config), TIMED.costs(LAYERS, 4)
    overlap = OverlapPlan(tuple(map(gaining, (0, 1, 3))), together=4)
    assert overlap.input_first == {1, 3}
    schedule = plan_schedule(config, placement, costs=costs, overlap=overlap)
    for stage, row in enumerate(schedule.rows):
        ops = [slot[0].op for slot in row]
        assert (Op.B in ops) == (stage in (0, 2)) and (Op.I in ops) == (stage in (1, 3))
    plain = plan_schedule(config, placement, costs=costs)
    assert simulate(schedule, costs).step_s < simulate(plain, costs).step_s
    full = replace(overlap, memory_bytes=0.0)
    assert plan_schedule(config, placement, costs=costs, overlap=full) == plain
    auto = replace(config, schedule=ScheduleKind["auto"])
    assert plan_schedule(auto, placement, costs=costs, overlap=overlap) == plan_schedule(auto, placement, costs=costs)


def test_memory_for_activations_is_what_the_states_leave():
    config = WeftConfig(pipeline=PipelineConfig(stages=2, microbatches=4))
    placement, costs = placement_of(config.pipeline), TIMED.costs(LAYERS, 2)

    states = [
        zero_memory(count, config.zero, config.train.precision, 2, largest_block=1000, microbatches=4)
        for count in (1000, 3000)
    ]

    def left(available):
        return activation_memory(config, costs, placement, states, available)

    assert left(1e6) == 0.8e6 - max(state.total for state in states)
    assert left(10) == WORK.hidden_bytes, "one micro-batch at least"
    config.pipeline.memory_cap_bytes = 77
    assert left(1e6) == 77
