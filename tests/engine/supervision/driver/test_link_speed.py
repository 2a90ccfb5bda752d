"""A slow link is distinguished from the speeds that a run's own steps cause."""

import random

import pytest

from weft.engine.supervision.driver.alerts import KNOWN_READINGS, SLOW_READINGS, SLOW_SHARE, LinkSpeed

USUAL = 1_000_000


class Reports:
    """A link whose rank reports on it, each time one step later if nothing else is said."""

    def __init__(self) -> None:
        self.link, self.step, self.sent = LinkSpeed(), 0, 0

    def read(self, *peaks: int, steps: int = 1, trains: bool = True) -> bool:
        for peak in peaks:
            self.step, self.sent = self.step + steps, self.sent + 1
            self.link.read(self.step, self.sent, peak, trains=trains)
        return self.link.is_slow

    def read_step(self, *peaks: int) -> bool:
        self.step += 1
        return self.read(*peaks, steps=0)


@pytest.fixture
def known():
    reports = Reports()
    reports.read(*[USUAL] * 40)
    return reports


@pytest.fixture
def long_steps():
    """Ten reports a step, in one of which the link is as fast as it can be."""
    reports = Reports()
    for _ in range(40):
        assert not reports.read_step(*[USUAL // 10] * 7, USUAL, *[USUAL // 10] * 2)
    return reports


def test_a_link_is_slow_once_enough_readings_in_a_row_are(known):
    slow = round(0.8 * SLOW_SHARE * USUAL)
    assert not known.read(*[slow] * (SLOW_READINGS - 1))
    assert known.read(slow)
    assert known.link.fastest_bps == slow


def test_half_of_what_is_usual_is_not_slow(known):
    assert not known.read(*[round(SLOW_SHARE * USUAL)] * 100)


def test_one_fast_reading_begins_the_count_anew(known):
    for _ in range(20):
        assert not known.read(*[USUAL // 10] * (SLOW_READINGS - 1), USUAL)


def test_the_fastest_is_that_of_the_slow_readings_alone(known):
    assert known.read(*(USUAL // n for n in (10, 4, 8, 5, 6)))
    assert known.link.fastest_bps == USUAL // 4
    known.read(USUAL, USUAL)
    assert not known.link.is_slow and known.link.fastest_bps == 0


def test_a_long_step_is_judged_by_its_fastest_moment(long_steps):
    numbers = random.Random(0)
    for _ in range(200):
        peaks = [USUAL // 10] * numbers.randrange(7, 14)
        peaks[numbers.randrange(len(peaks))] = USUAL
        assert not long_steps.read_step(*peaks)


def test_long_steps_are_slow_after_as_many_as_short_ones(long_steps):
    for _ in range(SLOW_READINGS - 1):
        assert not long_steps.read_step(*[USUAL // 10] * 10)
    assert not long_steps.read_step(*[USUAL // 10] * 9)
    assert long_steps.read(USUAL // 10, steps=0)


@pytest.mark.parametrize("usual", ["known", "long_steps"])
def test_a_step_that_the_link_makes_longer_is_not_waited_for(usual, request):
    reports = request.getfixturevalue(usual)
    fewest = SLOW_READINGS * (10 if usual == "long_steps" else 1)
    assert not reports.read_step(*[USUAL // 10] * (fewest - 1))
    assert reports.read(USUAL // 10, steps=0)


def test_what_is_sent_beside_training_says_nothing(known):
    assert not known.read(*[USUAL // 10] * 100, steps=0, trains=False)
    assert not known.read(USUAL)
    assert known.link.usual_bps == USUAL


@pytest.mark.parametrize("peak", [USUAL // 10, 0])
def test_a_link_that_is_not_used_is_not_slow(known, peak):
    for _ in range(100):
        known.step += 1
        known.link.read(known.step, known.sent, peak)
    assert not known.read(USUAL, USUAL)


def test_a_link_in_use_of_which_no_rate_is_known_is_not_slow(known):
    assert not known.read(*[0] * 100)


def test_first_readings_say_what_is_usual_and_nothing_else():
    reports = Reports()
    assert not reports.read(1, *[USUAL] * KNOWN_READINGS, USUAL)  # what the first has sent may be of long ago
    assert reports.link.usual_bps == USUAL


@pytest.mark.parametrize("share", [0.1, 0.4, 0.45])
def test_a_change_for_good_is_reported_and_becomes_usual(known, share):
    told = [known.read(round(share * USUAL)) for _ in range(200)]
    assert any(told[:10]) and not told[-1]
    assert known.link.usual_bps == pytest.approx(share * USUAL, rel=0.05)


def test_readings_that_scatter_are_not_slow():
    numbers = random.Random(0)
    reports = Reports()
    for _ in range(2000):
        assert not reports.read(numbers.randrange(USUAL * 7 // 10, USUAL * 13 // 10))


def test_a_burst_does_not_make_the_usual_speed_slow(known):
    known.read(20 * USUAL)
    assert not known.read(*[USUAL] * 100)


def test_numbers_of_any_size_are_taken(known):
    assert not known.read(1 << 62, 1, 1 << 62, 1)
