"""Agents report with every heartbeat, when a phase begins, and more often while a rank is stopped."""

from weft.engine.supervision.agent.reports import OFTEN, ReportTimes


def reports(cadence, until_s, phases=lambda now: 1, stopped=lambda now: False):
    """At which tenths of a second it reports."""
    found = []
    for tenth in range(round(until_s * 10)):
        now = tenth / 10
        cadence.beats(now)
        if cadence.tells(now, phases(now), lambda: stopped(now)):  # noqa: B023
            found.append(tenth)
    return found


def test_with_every_heartbeat():
    assert reports(ReportTimes(1.0), 3.0) == [0, 10, 20]


def test_a_phase_is_reported_at_once():
    assert reports(ReportTimes(2.0), 4.0, phases=lambda now: now >= 0.5) == [0, 5, 20]


def test_a_stopped_rank_is_reported_more_often_and_not_at_every_look():
    found = reports(ReportTimes(2.0), 4.0, stopped=lambda now: now >= 1.0)
    assert found == [0, *range(10, 40, 20 // OFTEN)]


def test_a_rank_that_stops_and_goes_on_is_no_reason_for_more():
    found = reports(ReportTimes(1.0), 4.0, stopped=lambda now: round(now * 10) % 2 == 1)
    assert len(found) <= 4 * OFTEN
