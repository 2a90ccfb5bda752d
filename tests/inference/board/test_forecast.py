"""Tests of predictions while a step runs late."""

import pytest

from weft.inference.board.forecast import Forecast

EDGES = (0.0, 1.0, 2.0, 3.0)  # bubbles from 0 to 1 and from 2 to 3


def found(edge, at_s, now_s, until_s, period_s=10.0):
    forecast = Forecast(EDGES, EDGES, (0.0, 1.0, 1.0, 1.0), period_s, num_steps=4)
    return list(forecast.bubbles(edge, at_s, now_s, until_s))


def test_a_late_step_is_late_until_its_end_and_so_are_the_next():
    assert found(2, 2.5, 2.5, 20.0) == [(2.5, 3.5), (10.5, 11.5), (12.5, 13.5)]


def test_an_early_step_is_early():
    assert found(1, 0.75, 0.75, 10.0) == [(1.75, 2.75), (9.75, 10.75)]


def test_an_edge_that_has_not_come_yet_makes_the_step_later_still():
    assert found(2, 2.0, 4.5, 14.0)[:2] == [(11.5, 12.5), (13.5, 14.5)]


def test_without_a_period_only_the_running_step_is_known():
    assert found(0, 0.0, 0.0, 100.0, period_s=0.0) == [(0.0, 1.0), (2.0, 3.0)]


@pytest.mark.parametrize("until_s", [0.0, -1.0])
def test_nothing_is_predicted_of_the_past(until_s):
    assert found(0, 0.0, 0.0, until_s) == []


def test_a_cautious_prediction_has_each_bubble_as_short_as_it_ever_was():
    forecast = Forecast(EDGES, EDGES, (0.0, 0.5, 1.0, 0.25), 10.0, num_steps=4)
    assert list(forecast.bubbles(0, 0.0, 0.0, 11.0, is_cautious=True)) == [(0.0, 0.5), (2.0, 2.25), (10.0, 10.5)]
    assert list(forecast.bubbles(0, 0.0, 0.0, 9.0)) == [(0.0, 1.0), (2.0, 3.0)]
