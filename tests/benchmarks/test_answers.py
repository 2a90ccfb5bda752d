"""Waits, lateness and throughput of `benchmarks answers`, from its observations."""

import pytest

from benchmarks.answers import Streamed, _figures, _rate


def streamed(name, *, begin_s, first_s, end_s, tokens=(1, 2), by_worker=True):
    return Streamed(name, begin_s, first_s, end_s, tokens, by_worker)


def test_a_prompt_waits_before_and_between_its_steps_and_not_for_those_of_others():
    answer = streamed("one", begin_s=10.0, first_s=14.5, end_s=15.0)
    stock = streamed("two", begin_s=20.0, first_s=21.25, end_s=22.0, by_worker=False)
    steps = [
        {"spans": [(11.0, 11.5)], "tokens": {"cmpl-one-0-ab": 16}},
        {"spans": [(11.5, 13.0)], "tokens": {"cmpl-three-0-ab": 16}},
        {"spans": [(13.0, 13.5)], "tokens": {"cmpl-one-0-ab": 8, "cmpl-three-0-ab": 8}},
    ]
    found = _figures([answer], [stock], steps)
    assert found["wait_s"] == [pytest.approx(2.5)]
    assert found["no_wait_s"] == [pytest.approx(4.5 - 2.5)]
    assert found["later_s"] == [pytest.approx(4.5 - 2.5 - 1.25)]
    assert (found["answers"], found["equal"], found["in bubbles"]) == (1, 1, 1)


def test_answers_without_a_worker_have_no_wait_and_are_not_compared():
    answer = streamed("one", begin_s=0.0, first_s=1.0, end_s=2.0, by_worker=False)
    other = streamed("two", begin_s=0.0, first_s=1.0, end_s=2.0, tokens=(1, 3), by_worker=False)
    found = _figures([answer], [other], [])
    assert (found["wait_s"], found["later_s"], found["equal"]) == ([0.0], [], 0)


def test_tokens_per_second_are_those_of_all_answers_from_the_first_request_to_the_last_token():
    together = [streamed(str(late), begin_s=late, first_s=late + 1.0, end_s=late + 2.0) for late in (0.0, 2.0)]
    assert _rate(together) == 4 / 4.0
