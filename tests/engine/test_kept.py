"""Tests that a value kept from one attempt for the next has the same inputs, and only where anything is kept."""

import pytest

from weft.engine.attempt import ReusedValues


def test_what_was_made_from_the_same_is_not_made_again():
    kept, made = ReusedValues(), []
    kept.keeps = True
    settings = {"layers": 2}
    for layers in (2, 2, 3, 3, 2):
        settings["layers"] = layers  # the same table, changed
        assert kept.get("model", settings, lambda: made.append(settings["layers"]) or settings["layers"]) == layers
    assert made == [2, 3, 2], "one value for each name"
    assert kept.find("data", settings) is None


def test_an_error_is_not_kept():
    kept = ReusedValues()
    kept.keeps = True
    with pytest.raises(ValueError):
        kept.get("model", 1, lambda: int("x"))
    assert kept.get("model", 1, lambda: 5) == 5


def test_nothing_is_kept_where_no_other_attempt_may_come():
    kept = ReusedValues()
    assert [kept.get("model", 1, lambda number=number: number) for number in range(3)] == [0, 1, 2]
