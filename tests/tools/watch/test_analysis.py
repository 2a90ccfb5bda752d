"""Where the time goes, outliers and limits of recorded runs, whose causes are known."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.tools.watch.recorded import STAGE, Recording
from weft.pipeline.costs import LinkCost
from weft.tools.watch import FOLDER
from weft.tools.watch.analysis import CATEGORIES, heat, links, measured_shares, where_time_goes
from weft.tools.watch.explain import Measured, limits
from weft.tools.watch.outliers import LABELS, outliers, pauses, window_until
from weft.tools.watch.record import RunRecord, producer_of, waits_for


def recorded(folder, *calls, **how):
    recording = Recording(folder / "run", **how)
    for steps, options in calls:
        recording.run(steps, **options)
    return RunRecord(recording.write())


@pytest.mark.parametrize("kind", ["1f1b", "zbv", "w"])
def test_the_categories_add_up_to_the_step_and_agree_with_the_simulator(tmp_path, kind):
    record = recorded(tmp_path, (12, {"jitter": 0.0}), kind=kind, local=LinkCost(latency_s=0.002))
    found = where_time_goes(record, record.spans(10))
    for shares in found["ranks"].values():
        assert sum(shares[name] for name in CATEGORIES) == pytest.approx(shares["step"], abs=1e-5)
        assert min(shares.values()) >= 0
    measured, predicted = found["measured"], found["predicted"]
    assert measured["step"] == pytest.approx(predicted["step"] + 0.001 + 0.0005 + 0.002, abs=1e-5)
    assert measured["compute"] == pytest.approx(predicted["compute"], abs=1e-5)
    assert measured["data"] == pytest.approx(0.001, abs=1e-6)
    assert measured["optimiser"] == pytest.approx(0.002, abs=1e-6)
    idle = [shares["bubbles"] + shares["exposed transfers"] for shares in (measured, predicted)]
    assert idle[0] == pytest.approx(idle[1], rel=0.02)
    assert measured["exposed collectives"] == pytest.approx(0.0005, abs=1e-6)


def test_a_rank_that_is_ten_percent_slower_is_the_only_outlier_within_twenty_steps(tmp_path):
    record = recorded(tmp_path, (30, {"jitter": 0.01}), (20, {"jitter": 0.01, "slow": {5: 1.1}}))
    found = outliers(record)
    assert [(each.rank, each.section) for each in found] == [(5, "compute")]
    assert found[0].share == pytest.approx(0.1, abs=0.02)
    assert found[0].text(record).startswith("rank 5 (stage 2, pipeline 1): compute takes ")


def test_a_host_that_is_ten_percent_slower_is_named_though_all_ranks_are_slower_in_some_steps(tmp_path):
    """Other programs of a machine slow all ranks at once, for several steps, by more than the host is slower."""
    recording = Recording(tmp_path / "run", stages=2, microbatches=4)
    noises = np.repeat(1 + np.random.default_rng(0).exponential(0.3, 18), 4)
    for step, noise in enumerate(noises[:70]):
        host = (1, 3) if step >= 50 else ()
        recording.run(1, slow={rank: noise * (1.1 if rank in host else 1.0) for rank in range(4)})
    record = RunRecord(recording.write())
    assert [outliers(record, last) for last in range(25, 51, 5)] == [[]] * 6
    found = outliers(record)
    assert sorted((each.rank, each.section) for each in found) == [(1, "compute"), (3, "compute")]
    assert [each.share for each in found] == pytest.approx([0.1, 0.1], abs=0.02)


def test_a_slow_host_is_named_though_its_peers_wait_for_it_inside_of_their_computations(tmp_path):
    """At ZeRO stage 3 replicas gather weights together, so that their computations last equally long."""
    recording = Recording(tmp_path / "run", stages=2)
    recording.run(25, slow=dict.fromkeys(range(4), 1.1))
    for rank in (0, 2):
        recording.wait_inside(rank, 0.1 / 1.1)
    record = RunRecord(recording.write())
    found = outliers(record)
    assert sorted((each.rank, each.section) for each in found) == [(1, "compute"), (3, "compute")]
    assert [each.share for each in found] == pytest.approx([0.1, 0.1], abs=0.02)
    map_of = heat(record)
    assert [each["rank"] for each in map_of["outliers"]] == [each.rank for each in found]
    assert {each["name"] for each in map_of["sections"]} <= set(LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 2, 4])
def test_no_rank_is_named_in_five_hundred_steps_without_a_cause(tmp_path, lines):
    record = recorded(tmp_path, (500, {"jitter": 0.02}), lines=lines, stages=2, microbatches=2)
    assert [(last, each) for last in range(25, 501, 5) for each in outliers(record, last)] == []


@pytest.mark.parametrize("lines", [1, 2, 3, 4])
def test_slow_ranks_are_named_rightly_with_any_number_of_replicas(tmp_path, lines):
    rng, right = np.random.default_rng(lines), 0
    for trial in range(10):
        rank, factor = int(rng.integers(4 * lines)), 1 + float(rng.uniform(0.07, 0.3))
        record = recorded(
            tmp_path / str(trial),
            (25, {"jitter": 0.01}),
            (20, {"jitter": 0.01, "slow": {rank: factor}}),
            lines=lines,
            microbatches=4,
            seed=trial,
        )
        right += [(each.rank, each.section) for each in outliers(record)] == [(rank, "compute")]
    assert right == 10


@pytest.mark.parametrize("lines", [1, 2])
def test_pauses_at_different_steps_on_different_ranks_are_named_and_no_rank_is(tmp_path, lines):
    calls = [(1, {"slow": {step % (4 * lines): 1.5} if step % 2 else {}}) for step in range(24)]
    record = recorded(tmp_path, (10, {}), *calls, lines=lines, microbatches=4)
    assert outliers(record) == []
    found = pauses(record)
    assert [each.section for each in found] == ["compute"] and found[0].count == 10
    assert set(found[0].ranks) == set(range(1, 4 * lines, 2)) and found[0].at_once == 1.0
    assert "compute pauses in 10 of 20 steps, the ranks at different steps" in found[0].text()
    named = [limit for limit in limits(record) if limit.kind == "pauses"]
    assert len(named) == 1 and "garbage collection" in named[0].text
    assert heat(record)["pauses"] == [found[0].text()]


@pytest.mark.slow
def test_no_pause_is_named_in_five_hundred_steps_without_one_nor_for_a_slow_rank(tmp_path):
    record = recorded(
        tmp_path, (500, {"jitter": 0.02}), (60, {"jitter": 0.02, "slow": {1: 1.1}}), lines=2, stages=2, microbatches=2
    )
    windows = [window_until(record, last) for last in range(25, 561, 5)]
    assert [each for window in windows for each in pauses(record, window)] == []


def test_the_heat_map_holds_the_means_of_the_files(tmp_path):
    record = recorded(tmp_path, (30, {"slow": {3: 1.2}}))
    found = heat(record, 10)
    assert (found["first"], found["last"]) == (21, 30)
    names = [section["name"] for section in found["sections"]]
    steps = pd.read_parquet(record.folder / FOLDER / "steps-host-00001.parquet")
    steps = steps[(steps.step > 20) & (steps["rank"] == 3) & (steps.section == "F")]
    row, column = found["ranks"].index(3), names.index("F")
    assert found["mean_s"][row][column] == pytest.approx((steps["count"] * steps.mean_s).sum() / 10)
    assert found["deviation"][row][column] == pytest.approx(0.2, abs=0.03)
    assert not any(found["alone"])


def test_transfers_are_as_long_as_the_link_is(tmp_path):
    record = recorded(tmp_path, (5, {"jitter": 0.0}), local=LinkCost(latency_s=0.004))
    found = links(record, record.spans(4))
    assert len(found) == 2 * 3 * 2
    assert all(hop["planned_s"] == pytest.approx(0.004) and not hop["crosses"] for hop in found)
    assert min(hop["fastest_s"] for hop in found) == pytest.approx(0.004, abs=1e-4)


def test_a_rank_waits_for_the_rank_of_the_neighbouring_stage(tmp_path):
    record = recorded(tmp_path, (3, {}))
    assert waits_for(record, record.plan["ranks"][1][2], "2RECV_F0") == record.plan["ranks"][1][1]
    assert waits_for(record, record.plan["ranks"][1][2], "2RECV_B0") == record.plan["ranks"][1][3]
    assert waits_for(record, 0, "0F1") is None and waits_for(record, 0, "data") is None
    assert waits_for(record, 999, "0RECV_B1") is None
    assert producer_of(record.schedules[0], record.schedules[0].rows[0][0][0]) is None


def simulated(tmp_path, name, **how):
    """Seconds of a step of a run without jitter."""
    recording = Recording(tmp_path / name, **{key: how.pop(key) for key in list(how) if key in CREATION})
    recording.run(10, jitter=0.0, **how)
    return Measured(RunRecord(recording.write())).step_s


CREATION = ("stages", "lines", "microbatches", "kind", "local")
GOOD = {"microbatches": 32, "kind": "auto", "local": LinkCost(latency_s=0.001)}
LIMITS = {
    "microbatches": ({**GOOD, "microbatches": 4}, {**GOOD, "microbatches": 8}, 2.0),
    "rank": ({**GOOD, "slow": {2: 1.3}}, GOOD, 1.0),
    "data": ({**GOOD, "data_s": 0.3}, {**GOOD, "data_s": 0.0}, 1.0),
    "link": ({**GOOD, "actual": LinkCost(latency_s=0.06)}, GOOD, 1.0),
    "schedule": ({"microbatches": 12, "kind": "1f1b"}, None, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIMITS)
def test_the_planted_limit_is_named_and_its_gain_is_that_of_the_change(tmp_path, kind):
    planted, changed, tokens = (dict(each) if isinstance(each, dict) else each for each in LIMITS[kind])
    actual = planted.pop("actual", None)
    recording = Recording(tmp_path / "planted", **{key: planted[key] for key in planted if key in CREATION})
    options = {key: value for key, value in planted.items() if key not in CREATION}
    recording.run(30, jitter=0.0, local=actual, **options)
    record = RunRecord(recording.write())
    found = limits(record)
    assert found and found[0].kind == kind, found
    if changed is not None:
        before, after = Measured(record).step_s, simulated(tmp_path, "changed", **changed)
        assert found[0].gain == pytest.approx(tokens * before / after - 1, abs=0.05)


def test_a_repeated_step_counts_once_and_a_growing_run_is_read_again(tmp_path):
    recording = Recording(tmp_path / "run")
    recording.run(4)
    recording.events.append(recording.events[-1].copy())
    recording.events[-1]["start"] += 100
    recording.events[-1]["end"] += 100
    record = RunRecord(recording.write())
    assert record.step_range == (1, 4)
    spans = record.spans(4)
    assert len(spans) == len(recording.events[0]) and spans.start_s.min() > 1e9 + 100
    assert not record.refresh()
    recording.run(1)
    recording.write()
    assert record.refresh() and record.step_range == (1, 6)


@pytest.mark.parametrize("damage", ["no folder", "no plan", "not JSON", "another plan", "a part"])
def test_a_damaged_run_is_refused_by_name_or_read_without_the_damage(tmp_path, damage):
    recording = Recording(tmp_path / "run")
    recording.run(3)
    folder = recording.write()
    if damage == "no folder":
        folder = tmp_path / "nothing"
    elif damage == "no plan":
        (folder / "plan.json").unlink()
    elif damage == "not JSON":
        (folder / "plan.json").write_text("{")
    elif damage == "another plan":
        (folder / "plan.json").write_text(json.dumps({"placement": []}))
    else:
        (folder / "watch" / "steps-host-00002.parquet").write_bytes(b"PAR1 no parquet")
        (folder / "watch" / "spans-host-00002.parquet").write_bytes(b"")
        assert RunRecord(folder).step_range == (1, 3) and len(RunRecord(folder).spans(2))
        return
    with pytest.raises(ValueError, match=str(folder)):
        RunRecord(folder)


def test_shares_of_a_step_without_events_are_empty(tmp_path):
    record = recorded(tmp_path, (3, {}))
    assert measured_shares(record, record.spans(99)) == {} and STAGE.forward_s == 0.01


def test_an_adapted_run_is_compared_with_the_schedules_that_it_runs(tmp_path):
    """Replica 0 is slow, and its micro-batches have been moved to replica 1, whose ranks then compute as long."""
    recording = Recording(tmp_path / "run", stages=2, lines=2, microbatches=6)
    recording.run(30, slow={0: 2.0, 2: 2.0})
    record = RunRecord(recording.write())
    first_s = [timeline.step_s for timeline in record.predictions]
    plan = json.loads((record.folder / "plan.json").read_text())
    slow = json.loads(json.dumps(plan["costs"]))
    for stage in slow["stages"]:
        stage |= {name: 2 * stage[name] for name in ("forward_s", "input_s", "weight_s")}
    by_count = {count: Recording(tmp_path / str(count), stages=2, microbatches=count) for count in (4, 8)}
    plan |= {
        "schedules": {str(count): each._plan()["schedules"]["1"] for count, each in by_count.items()},
        "members": [
            {"pipelines": 1, "local_rank": 0, "schedule": "4", "costs": 0},
            {"pipelines": 1, "local_rank": 0, "schedule": "8", "costs": 1},
        ],
        "measured_costs": [slow, plan["costs"]],
        "adapted_after": 30,
    }
    (record.folder / "plan-until-30.json").write_text((record.folder / "plan.json").read_text())
    (record.folder / "plan.json").write_text(json.dumps(plan))
    assert record.refresh() and not record.refresh()
    assert record.of_step(31) is record and record.of_step(30) is record.of_step(1)
    assert [timeline.step_s for timeline in record.of_step(30).predictions] == first_s
    assert [schedule.num_microbatches for schedule in record.of_step(30).schedules] == [6, 6]
    assert [schedule.num_microbatches for schedule in record.schedules] == [4, 8]
    steps_s = [timeline.step_s for timeline in record.predictions]
    assert steps_s == pytest.approx([2 * by_count[4].step_s, by_count[8].step_s]) and steps_s != first_s
    for line, each in enumerate(by_count.values()):
        assert record.schedules[line].rows == each.schedule.rows
    assert record.equal_shares(np.array([0, 1, 2, 3]), 30, 2).tolist() == [[1.0] * 4, [1.5, 0.75, 1.5, 0.75]]
    (record.folder / "plan-until-30.json").write_text("{")
    assert RunRecord(record.folder).of_step(30).schedules[0].num_microbatches == 4, "it cannot be read"
    (record.folder / "plan.json").write_text("{")
    assert not record.refresh() and record.schedules[0].num_microbatches == 4


def test_ranks_that_took_micro_batches_are_no_outliers(tmp_path):
    recording = Recording(tmp_path / "run", stages=2, lines=3, microbatches=6)
    recording.run(30, jitter=0.01)
    taken = dict.fromkeys((2, 5), 1.5) | dict.fromkeys((0, 1, 3, 4), 0.75)
    recording.run(30, jitter=0.01, slow=taken)
    record = RunRecord(recording.write())
    assert {each.rank for each in outliers(record)} == {2, 5}
    plan = json.loads((record.folder / "plan.json").read_text())
    by_count = {count: Recording(tmp_path / str(count), stages=2, microbatches=count) for count in (4, 8)}
    plan["schedules"] |= {str(count): each._plan()["schedules"]["1"] for count, each in by_count.items()}
    plan["members"] = [{"pipelines": 1, "local_rank": 0, "schedule": key} for key in ("4", "4", "8")]
    (record.folder / "plan.json").write_text(json.dumps(plan | {"adapted_after": 30}))
    assert record.refresh() and not outliers(record) and not pauses(record)


def test_steps_before_an_adaptation_are_not_measured_with_those_after(tmp_path):
    recording = Recording(tmp_path / "run", stages=2, microbatches=6)
    recording.run(30, slow={0: 2.0})
    recording.run(3)
    record = RunRecord(recording.write())
    plan = json.loads((record.folder / "plan.json").read_text())
    (record.folder / "plan.json").write_text(json.dumps(plan | {"adapted_after": 30}))
    assert record.refresh()
    first, second = (stage.compute_s for stage in Measured(record).costs[0].stages)
    assert first == pytest.approx(second, rel=0.05)
