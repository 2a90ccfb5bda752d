"""Tests of the files of a finished run."""

from dataclasses import replace
from types import SimpleNamespace

from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.pipeline.profile import fit_costs, load_costs
from weft.pipeline.simulation import simulate
from weft.recipes import finish


def test_the_costs_of_a_run_can_be_planned_with(tmp_path, monkeypatch):
    schedule = generate("1f1b", Placement.straight(2), 4)
    unit = CostModel.unit(2)
    costs = replace(unit, stages=tuple(replace(stage, send_s=0.25) for stage in unit.stages))
    measured = simulate(schedule, costs)
    engine = SimpleNamespace(
        plan=SimpleNamespace(costs=unit, predicted=lambda costs: simulate(schedule, costs)),
    )
    said = []
    monkeypatch.setattr(finish, "print_once", said.append)
    finish.draw_timeline(engine, [measured] * 3, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"costs.yaml", "timeline.json", "timeline.png"}
    assert load_costs(tmp_path / "costs.yaml", 2) == fit_costs([measured], unit) == costs
    assert "measured 15.750 s, predicted 15.750 s" in said[0]
