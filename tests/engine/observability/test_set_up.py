"""The parts of a rank's set-up: they follow one another, and every rank's line is there."""

import json
import stat
from time import monotonic

import pytest

from weft.engine.attempt import SetUpTimes


def test_parts_follow_one_another_and_begin_anew(tmp_path):
    began = monotonic()
    times = SetUpTimes()
    for part in ("join", "plan", "join"):
        times.done(part)
    assert list(times.parts) == ["join", "plan"]
    assert 0 <= sum(passed for passed, _ in times.parts.values()) <= monotonic() - began
    path = tmp_path / "run" / "set_up.jsonl"
    times.write(path, rank=0)
    times.begin()
    times.write(path, rank=1)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["rank"], list(first["parts"])) == (0, ["join", "plan"]) and second["parts"] == {}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path):
    (tmp_path / "other").touch()
    (tmp_path / "set_up.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        SetUpTimes().write(tmp_path / "set_up.jsonl")
    assert (tmp_path / "other").read_text() == ""
