"""Schedules survive their files; broken files are refused by name."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.cases import ANY, maybe_lowered, schedules
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import ScheduleError
from weft.pipeline.serialization import (
    load_schedule,
    schedule_from_csv,
    schedule_from_json,
    schedule_to_csv,
    schedule_to_json,
)
from weft.pipeline.validation import validate


@given(maybe_lowered)
def test_json_round_trip(schedule):
    assert schedule_from_json(schedule_to_json(schedule)) == schedule


@given(schedules())
def test_csv_round_trip_keeps_rows_and_the_ranks_of_stages(schedule):
    read = schedule_from_csv(schedule_to_csv(schedule), name=schedule.name)
    assert read.rows == schedule.rows
    assert read.num_microbatches == schedule.num_microbatches
    assert read.placement.stage_ranks == schedule.placement.stage_ranks
    assert schedule_to_csv(lower(schedule)) == schedule_to_csv(schedule)


@given(ANY)
def test_a_placement_is_inferred_from_its_ranks(placement):
    found = Placement.infer(placement.stage_ranks)
    assert found.stage_ranks == placement.stage_ranks
    if min(placement.groups) > 1 and len(placement.legs) > 1:
        assert (found.groups, found.legs) == (placement.groups, placement.legs)


@pytest.mark.parametrize("stage_ranks", [(1, 2, 0), (0, 1, 1), (0, 1, 2, 0, 2, 1), (1, 0, 0), (0, 1, 1, 0, 2, 3, 2, 3)])
def test_other_layouts_are_refused(stage_ranks):
    with pytest.raises(
        ValueError, match=r"not a supported placement; stages must visit each group of ranks once per leg"
    ):
        Placement.infer(stage_ranks)


def test_csv_is_torchs_grid():
    assert schedule_to_csv(generate("1f1b", Placement.straight(3), 4)) == (
        "0F0,0F1,0F2,,,0B0,0F3,0B1,,0B2,,0B3\n,1F0,1F1,,1B0,1F2,1B1,1F3,1B2,,1B3\n,,2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"s.csv: rank 0, cell 1: action '0X0': expected STAGE OP MICROBATCH"),
        ("0F0,0SEND_F0,0B0\n", r"s.csv: rank 0: 0SEND_F0 in a compute-only schedule; dump it as compute_only"),
        ("0F0,1B0\n1F0,1B0\n", r"s.csv: stage 1 stands on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", r"s.csv: stage 1 is missing: stages run from 0 to 2"),
        ("", r"s.csv: no actions in it"),
        ("0F0,0B0\n,\n", r"s.csv: 2 rows for stages on 1 ranks"),
        ("99999999999F0\n", r"s.csv: rank 0, cell 0: action '99999999999F0': expected STAGE OP MICROBATCH"),
        ("999999999F0\n", r"s.csv: stage 0 is missing: stages run from 0 to 999999999"),
        ("0F999999999,0B999999999\n", r"s.csv: pipeline.microbatches=1000000000: 3e\+09 actions on 1 virtual stages"),
        ("0F0,0F0," * 1_000_000, r"s.csv: rank 0, cell 1: 0F0 stands twice; leave one out"),
        ("0F٣\n", r"s.csv: rank 0, cell 0: action '0F٣': expected STAGE"),
        ("0F" + "1" * 200_000 + "\n", r"s.csv: .{0,300}$"),
    ],
)
def test_broken_csv_is_refused_by_place(tmp_path, text, message):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_schedule(tmp_path / "s.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, r"s.json: format: expected 'weft.schedule'"),
        ({"version": 9}, r"s.json: version=9: this Weft reads version 1"),
        ({"rows": None}, r"s.json: rows=None: expected list"),
        ({"rows": [["0F0", 3]]}, r"s.json: rank 0, cell 1: 3 is not text"),
        ({"placement": {"groups": [2], "legs": "x", "sites": [2]}}, r"s.json: placement.legs='x'"),
        ({"rows": ["0F0"]}, r"s.json: rows: rank 0 is no list of cells"),
        ({"rows": [[]]}, r"s.json: rows: 1 rows, its placement has 2 ranks; write one row per rank"),
        ({"rows": [["0F0"], ["1F0"], ["2F0"]]}, r"s.json: rows: 3 rows, its placement has 2 ranks"),
        ({"num_microbatches": True}, r"s.json: num_microbatches=True: expected a whole number of at least 1"),
        ({"num_microbatches": 10**9}, r"s.json: pipeline.microbatches=1000000000: 6e\+09 actions"),
        ({"placement": {"groups": [2], "legs": "d", "sites": [2], "pipelines": 0}}, r"placement.pipelines=0: expected"),
        ({"placement": {"groups": [2], "legs": "d", "sites": [2], "pipelines": True}}, r"pipelines=True: expected"),
        ({"placement": {"groups": [2], "legs": "d" * 10**6, "sites": [2]}}, r"placement.legs: 1000000 legs, more than"),
        ({"placement": {"groups": [10**9], "legs": "d", "sites": [10**9]}}, r"groups: 1000000000 ranks, more than"),
        ({"name": True}, r"s.json: name=True: expected str"),
        ({"placement": {"groups": [2], "legs": "d"}}, r"s.json: sites=None: expected list"),
        (
            {"placement": {"groups": ["2"], "legs": "d", "sites": [2]}},
            r"s.json: groups=\['2'\]: expected whole numbers",
        ),
    ],
)
def test_broken_json_is_refused_by_field(tmp_path, change, message):
    data = json.loads(schedule_to_json(generate("1f1b", Placement.straight(2), 2))) | change
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        load_schedule(tmp_path / "s.json")


def test_what_is_no_file_or_no_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.json: cannot be read"):
        load_schedule(tmp_path / "none.json")
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(ValueError, match=r"s.json: it is not JSON"):
        load_schedule(tmp_path / "s.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": ' + "9" * 5000 + "}", "\x00", '{"a": 1' * 50_000])
def test_deep_or_endless_json_is_refused(tmp_path, text):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=r"s.json: it is not JSON"):
        load_schedule(tmp_path / "s.json")


def test_what_a_file_lacks_is_found_without_counting_to_the_end(tmp_path):
    """A million micro-batches of which two actions stand there."""
    data = json.loads(schedule_to_json(generate("1f1b", Placement.straight(1), 1))) | {"num_microbatches": 10**6}
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match="0F1 is missing"):
        validate(load_schedule(tmp_path / "s.json"))


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_with_a_value_error(text):
    for read in (schedule_from_json, lambda t: schedule_from_csv(t, name="t")):
        with suppress(ValueError):
            read(text)
