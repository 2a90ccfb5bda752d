"""An attempt that comes after one with the same settings does not check the model again."""

import json

import pytest

from weft.conf import load
from weft.recipes import preparation


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Checks as an attempt does; returns how often the model was run so far."""
    runs = []
    monkeypatch.setattr(preparation, "check_stages", lambda *_, **__: runs.append(1))

    def check(attempt, *overrides):
        monkeypatch.setenv("WEFT_ATTEMPT", str(attempt))
        config = load(["recipe=quickstart", *overrides])
        preparation._check_model(config, tmp_path)
        (tmp_path / preparation.SELF_CHECK).write_text(preparation.checked(config))  # as a run that is not refused
        return len(runs)

    return check


def test_a_later_attempt_goes_by_what_an_earlier_one_has_found(check, tmp_path):
    assert [check(1), check(2), check(3)] == [1, 1, 1]
    assert "overrides" in json.loads((tmp_path / "self_check.json").read_text())["model"]
    assert check(1) == 2, "a run that is started anew checks: code may have changed"


@pytest.mark.parametrize("override", ["model.overrides.hidden_size=96", "data.packing=false"])
def test_other_settings_are_checked(check, override):
    check(1)
    assert [check(2, override), check(3, override)] == [2, 2]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attempt": 0}', "\x00"])
def test_a_damaged_file_is_no_check(check, tmp_path, text):
    check(1)
    (tmp_path / "self_check.json").write_text(text)
    assert check(2) == 2


def test_a_check_that_fails_is_not_passed(check, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise ValueError("differs")

    monkeypatch.setattr(preparation, "check_stages", fail)
    for attempt in (1, 2):
        with pytest.raises(ValueError, match="differs"):
            check(attempt)
    assert not (tmp_path / "self_check.json").exists()
