"""Numbers and files of users are taken up to both ends of their ranges, and refused behind them."""

import math

import pytest

from weft.pipeline.limits import MOST_ACTIONS, MOST_NUMBER, check_size, count, known_fields, number, short_repr


@pytest.mark.parametrize(
    ("value", "options", "found"),
    [
        (0, {}, 0.0),
        (-0.0, {}, 0.0),
        ("1e6", {}, 1e6),
        (MOST_NUMBER, {}, MOST_NUMBER),
        (1e-300, {"above": 0.0}, 1e-300),
        (2.5, {"above": 2.4}, 2.5),
        (math.inf, {"free": True}, math.inf),
        (2 * MOST_NUMBER, {"free": True}, 2 * MOST_NUMBER),
    ],
)
def test_a_number_in_range_is_taken(value, options, found):
    assert number(value, "x", **options) == found


@pytest.mark.parametrize(
    ("value", "options", "said"),
    [
        (-1e-9, {}, "at least 0"),
        (-1, {"free": True}, "at least 0"),
        (0, {"above": 0.0}, "above 0"),
        (2.4, {"above": 2.4}, "above 2.4"),
        (math.nextafter(MOST_NUMBER, math.inf), {}, "finite"),
        (math.inf, {}, "finite"),
        (-math.inf, {"free": True}, "at least 0"),
        (math.nan, {}, "expected a number"),
        (math.nan, {"free": True}, "expected a number"),
        (10**400, {}, "expected a number"),
        (True, {}, "x=True: expected a number"),
        (False, {}, "x=False: expected a number"),
        ("many", {}, "x='many': expected a number"),
        (None, {}, "x=None"),
        ([1], {}, "x=[1]"),
    ],
)
def test_another_is_refused_with_what_is_expected(value, options, said):
    with pytest.raises(ValueError, match=r"^x=") as caught:
        number(value, "x", **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(("least", "most"), [(1, 10**9), (0, 0), (-2, 3)])
def test_a_count_lies_between_its_ends(least, most):
    for value in (least, most):
        assert count(value, "x", least=least, most=most) == value
    for value in (least - 1, most + 1, float(least), str(least), True, None):
        with pytest.raises(ValueError, match=f"expected a whole number of at least {least} and at most {most}"):
            count(value, "x", least=least, most=most)
    with pytest.raises(ValueError, match="at least 1 and at most 1000000000"):
        count(0, "x")


def test_a_step_of_just_so_many_actions_is_scheduled():
    stages = 8
    most = MOST_ACTIONS // (3 * stages)
    check_size(stages, most)
    with pytest.raises(
        ValueError, match=rf"pipeline.microbatches={most + 1}: .* on 8 virtual stages, more than 2e\+07"
    ):
        check_size(stages, most + 1)


def test_fields_that_are_known_pass_and_the_first_other_is_named():
    assert known_fields({"b": 1}, "it", ("a", "b")) == {"b": 1}
    given_table = {"a": 1}
    assert known_fields(given_table, "it", ("a",)) is not given_table
    with pytest.raises(ValueError, match="it: field 'c' is not known; one of a, b"):
        known_fields({"a": 1, "c": 2, "d": 3}, "it", ("a", "b"))
    with pytest.raises(ValueError, match=r"it: expected a table of a, b; got \[1\]"):
        known_fields([1], "it", ("a", "b"))


@pytest.mark.parametrize(
    ("value", "most"),
    [("x" * 10**6, 70), (list(range(10**5)), 40), ({n: n for n in range(10**4)}, 60), (10**4000, 80)],
    ids=["text", "list", "table", "number"],
)
def test_a_users_value_is_shown_in_one_line(value, most):
    assert len(short_repr(value)) <= most
    assert short_repr([[[[1]]]]) == "[[[...]]]" and short_repr("short") == "'short'"
    assert short_repr([1, 2, 3, 4, 5]) == "[1, 2, 3, 4, ...]" and short_repr((1, 2, 3, 4)) == "(1, 2, 3, 4)"


@pytest.mark.parametrize("value", [1 << 50_000, -(1 << 50_000)], ids=["above", "below"])
def test_a_number_of_more_digits_than_python_writes_is_shortened(value):
    """As 0xfff... in a file may be."""
    for refuse in (number, count):
        with pytest.raises(ValueError, match=r"^x=<a number of 50001 bits>: expected a"):
            refuse(value, "x")
    assert short_repr([value, 1]) == "[<a number of 50001 bits>, 1]"


def test_the_longest_number_that_is_written_out_has_4096_bits():
    assert "..." in short_repr((1 << 4096) - 1) and short_repr(1 << 4096) == "<a number of 4097 bits>"
