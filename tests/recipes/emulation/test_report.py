"""Tests of an emulation's report."""

from types import SimpleNamespace

import pytest

from weft.comm.emulated.clock import EmulatedClock
from weft.comm.emulated.operation_log import EmulationError
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.recipes.emulation.command import _beside_simulation, _disagreement
from weft.recipes.emulation.turns import AGREED, Emulation, _agree, emulate
from weft.recipes.emulation.what_if import WhatIf


def found(*rounds):
    turns = [SimpleNamespace(step_s=(rounds[-1] * share,)) for share in (0.9, 1.0, 1.2)]
    return Emulation(plan=None, classes=[], real=[], turns=turns, rounds=list(rounds), costs=None, set_up_s=[])


def test_rounds_agree_by_the_last_two():
    assert found(1.0, 2.0, 2.0 * (1 + AGREED / 2)).agreed
    assert not found(2.0, 2.0, 2.2).agreed


@pytest.mark.parametrize(("steps", "agree"), [((1.0, 1.0, 1.0), False), ((1.0, 1.1, 0.9), True)])
def test_rounds_that_differ_by_less_than_their_steps_are_the_last(steps, agree):
    turns = [SimpleNamespace(step_s=steps)] * 3
    assert _agree([1.1, 1.0], turns) == agree
    assert _agree([1.0, 1.01], turns) and not _agree([1.0], turns) and not _agree([2.0, 1.0], turns)


def test_what_a_slow_rank_takes_longer_is_no_time_of_the_twin():
    clock = EmulatedClock()
    clock.leave_out(-5.0)
    with clock.left_out():
        pass
    assert 0 <= clock.twin_s < 5


def test_rounds_that_differ_are_reported_with_a_remedy():
    assert "real ranks of the last: 1980.0 to 2640.0 ms" in _disagreement(found(2.0, 2.0, 2.2))


@pytest.mark.parametrize(("what_if", "step_s"), [(WhatIf(), 15.0), (WhatIf(slow={1: 0.5}), 27.0)])
def test_the_simulated_step_has_the_conditions_of_the_emulated_one(what_if, step_s):
    placement = Placement.straight(2)
    layout = SimpleNamespace(position=lambda rank: SimpleNamespace(line=0), lines_of=lambda stage: (stage,))
    plan = SimpleNamespace(
        layout=layout,
        placement=placement,
        members=[SimpleNamespace(local_rank=0, pipelines=1)],
        schedule=lambda line: lower(generate("1f1b", placement, 4)),
    )
    one = Emulation(
        plan=plan,
        classes=[],
        real=[],
        turns=[SimpleNamespace(rank=0, step_s=(30.0,))],
        rounds=[],
        costs=CostModel.unit(2),
        set_up_s=[],
    )
    assert f"measured: {1e3 * step_s:.1f} ms; the {1e3 * (30.0 - step_s):+.1f} ms" in _beside_simulation(one, what_if)


def test_an_emulation_on_another_device_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(EmulationError, match=r"^DS_ACCELERATOR=cuda: .*; emulate on CPUs"):
        emulate(None, 8, None, steps=1)
