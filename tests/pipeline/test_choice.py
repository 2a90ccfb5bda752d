"""The choice of a placement: what is compared, what is left out and why, and in which order."""

from dataclasses import replace
from statistics import fmean

import pytest

from weft.pipeline import choice
from weft.pipeline.cell import add_relays
from weft.pipeline.choice import choose, placements
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.lowering import lower
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import sampled_steps_s, simulate

PIECES = CostModel.unit(8, wan=LinkCost(latency_s=0.5, bandwidth_bps=16.0))


def costs_of(placement):
    return PIECES.cut(placement.num_stages)


def test_each_option_is_autos_schedule_and_what_it_takes():
    found = choose(placements(4), costs_of, 4)
    assert {option.name for option in found.options} | found.left_out.keys() == set(placements(4))
    for option in found.options:
        placement = placements(4)[option.name]
        assert option.schedule == generate_auto(placement, 4, costs_of(placement), None, 0.0)
        assert option.costs == costs_of(placement)
        assert option.step_s == simulate(lower(option.schedule), option.costs).step_s >= option.bound_s > 0
        assert option.peak_bytes == peak_bytes(option.schedule, option.costs)
    steps_s = [option.step_s for option in found.options]
    assert steps_s == sorted(steps_s) and found.best is found.options[0]


@pytest.mark.parametrize("jitter", [(0.0, 0.1, 0.0, 0.1, 0.6, 0.0, 0.6, 0.1), (0.6,) * 8])
def test_with_samples_placements_are_compared_by_the_mean_step(jitter):
    stages = (replace(stage, jitter=each) for stage, each in zip(CostModel.unit(8).stages, jitter, strict=True))
    costs = replace(CostModel.unit(8), stages=tuple(stages))
    usual, sampled = (
        choose(placements(4), lambda placement: costs.cut(placement.num_stages), 4, jitter_samples=samples)
        for samples in (0, 16)
    )
    for option in sampled.options:
        assert option.step_s == fmean(sampled_steps_s(lower(option.schedule), option.costs, range(-16, 0)))
    means_s = [fmean(sampled_steps_s(lower(o.schedule), o.costs, range(99, 299))) for o in (usual.best, sampled.best)]
    assert means_s[1] <= 1.005 * means_s[0]


def test_the_whole_cell_is_scheduled():
    places = {"straight": Placement.straight(4, (2, 2))}
    (option,) = choose(places, costs_of, 2, pipelines=2).options
    shared = costs_of(places["straight"]).for_cell(2)
    assert option.schedule.placement == replace(places["straight"], pipelines=2) and option.costs == shared
    assert option.step_s == simulate(add_relays(lower(option.schedule), shared), shared).step_s


def test_what_has_no_costs_or_takes_longer_anyway_is_left_out_with_the_reason():
    def some(placement):
        if placement.legs == "dd":
            raise ValueError("layers do not divide")
        return costs_of(placement)

    slow = CostModel.unit(8)
    found = choose(placements(4), some, 4)
    assert found.left_out["interleaved"] == "layers do not divide"

    def slower(placement):
        made = slow.cut(placement.num_stages)
        stages = tuple(replace(stage, forward_s=100.0) for stage in made.stages)
        return replace(made, stages=stages) if placement.legs != "d" else made

    found = choose(placements(4), slower, 4)
    assert [option.name for option in found.options] == ["straight"]
    assert set(found.left_out) == {"fold", "interleaved"}
    assert all(reason.startswith("takes at least ") for reason in found.left_out.values())
    with pytest.raises(ValueError, match="layers do not divide"):
        choose({"interleaved": placements(4)["interleaved"]}, some, 4)
    with pytest.raises(ValueError, match="memory"):
        choose(placements(4), costs_of, 4, memory_cap_bytes=0.5)


def test_a_search_makes_none_longer():
    before = {option.name: option.step_s for option in choose(placements(3), costs_of_three, 5).options}
    after = {
        option.name: option.step_s for option in choose(placements(3), costs_of_three, 5, search_seconds=0.2).options
    }
    assert after.keys() == before.keys() and all(after[name] <= before[name] for name in before)
    assert min(after.values()) <= min(before.values())


def costs_of_three(placement):
    return CostModel.unit(12, wan=LinkCost(latency_s=0.25)).cut(placement.num_stages)


def test_only_what_is_close_to_the_best_and_above_its_bound_is_searched(monkeypatch):
    """Seconds are shared out among those; of two the interleaved one is longer by more than a tenth."""
    asked = []

    def noted(placement, count, costs, cap, seconds, samples):
        asked.append((placement.legs, seconds))
        return generate_auto(placement, count, costs, cap, 0.0, samples)

    monkeypatch.setattr(choice, "generate_auto", noted)
    options = choose(placements(4), uneven, 3).options
    assert {seconds for _, seconds in asked} == {0.0}
    asked.clear()
    best_s = options[0].step_s
    worth = {
        option.schedule.placement.legs
        for option in options
        if option.step_s <= 1.1 * best_s and option.step_s > option.bound_s * (1 + 1e-6)
    }
    assert worth and len(worth) < len(options)
    choose(placements(4), uneven, 3, search_seconds=6.0)
    assert {legs: seconds for legs, seconds in asked if seconds} == dict.fromkeys(worth, 6.0 / len(worth))


def uneven(placement):
    """Later pieces take longer, and all do where stages are interleaved."""
    slower = 1.12 if placement.legs == "dd" else 1.0
    stages = tuple(
        replace(stage, forward_s=slower * (1.0 + 0.3 * number), input_s=slower, weight_s=0.4 * slower)
        for number, stage in enumerate(CostModel.unit(8).stages)
    )
    return CostModel(stages=stages).cut(placement.num_stages)
