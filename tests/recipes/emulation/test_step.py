"""Tests of a real rank's slots: the host's own work counts, and waiting does not."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from weft.pipeline.action import SENDS, Action, Op
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.profile import fit_costs
from weft.recipes.emulation.step import TwinStep

LOOP_S, COMPUTE_S, SEND_S, RECEIVE_S, WAIT_S = 0.25, 4.0, 0.5, 0.125, 8.0
"""Between two slots; in a slot; beyond the wait; the wait."""


class Clock:
    """A clock that the test advances."""

    now_s = waited_s = 0.0

    def now(self):
        return self.now_s

    def left_out(self):
        return nullcontext()

    def leave_out(self, seconds):
        self.now_s -= seconds


def step_of(clock, speed):
    """The middle one of three ranks, its schedule and its costs."""
    placement = Placement.straight(3)
    schedule = lower(generate("gpipe", placement, 4))
    plan = SimpleNamespace(
        placement=placement,
        schedule=lambda line: schedule,
        members=[SimpleNamespace(local_rank=0, pipelines=1)],
        layout=SimpleNamespace(
            position=lambda rank: SimpleNamespace(line=0, stage=rank), lines_of=lambda stage: (stage,)
        ),
    )
    delays = SimpleNamespace(compute_s=lambda stage, action, seconds: seconds, late_s=lambda message: 0.0)
    what_if = SimpleNamespace(factor=lambda rank, stage: speed, late_s=lambda random: 0.0)
    costs = CostModel.unit(3)
    step = TwinStep(SimpleNamespace(rank=1, clock=clock), plan, costs, delays, what_if, 0)
    step.step_begins(4)
    return step, schedule, costs


@pytest.mark.parametrize("speed", [1.0, 0.8])
def test_a_slot_lasts_until_the_next_and_a_receive_counts_for_what_it_brings(speed):
    clock = Clock()
    step, schedule, costs = step_of(clock, speed)
    for slot in schedule.rows[1]:
        step.slot_begins(slot)
        if (op := slot[0].op) in (Op.RECV_F, Op.RECV_B):
            clock.waited_s += WAIT_S
            clock.now_s += WAIT_S + RECEIVE_S
        else:
            clock.now_s += SEND_S if op in SENDS else COMPUTE_S
        step.slot_ends(slot)
        clock.now_s += LOOP_S
    fitted = fit_costs(step.timelines(schedule, 0), costs).stages[1]
    assert fitted.forward_s == pytest.approx(COMPUTE_S + RECEIVE_S + 2 * LOOP_S)
    assert fitted.input_s + fitted.weight_s == pytest.approx(COMPUTE_S + RECEIVE_S + 2 * LOOP_S)
    assert fitted.send_s == pytest.approx(SEND_S + LOOP_S)


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_an_optimiser_step_takes_its_processor_time_at_the_speed_of_the_rank(monkeypatch, speed):
    clock, cpu = Clock(), SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("weft.recipes.emulation.step.thread_time", lambda: cpu.now_s)
    step, _, _ = step_of(clock, speed)
    backward, own = (Action(Op.B, 1, 3),), (Action(Op.STEP, 1, 0),)
    for slot, waited_s in ((backward, 0.0), (own, WAIT_S)):
        step.slot_begins(slot)
        cpu.now_s += COMPUTE_S
        clock.now_s += COMPUTE_S + waited_s
        step.slot_ends(slot)
    assert [(span.slot, span.end_s - span.start_s) for span in step.spans[-1]] == [
        (backward, COMPUTE_S),
        (own, COMPUTE_S),
    ]
    assert clock.now_s == 2 * COMPUTE_S / speed + WAIT_S
