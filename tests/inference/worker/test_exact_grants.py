"""Tests of the gate's requests to the cost model, its trials, and the waker: with the test's clocks and boards."""

from contextlib import closing
from types import SimpleNamespace

import pytest

from weft.inference.board.common_bubbles import Opening
from weft.inference.board.reader import BoardState, Bubble
from weft.inference.placement.prefill_cost import TRUSTED
from weft.inference.worker import gate as module
from weft.inference.worker.gate import CHECK_S, MAX_PAUSE_S, MIN_PAUSE_S, MIN_REMAINING, MIN_TOKENS, Gate, Waker

NOW_S = 100.0


class Board:
    """A board whose bubble a test sets, and how long it was waited for."""

    def __init__(self, opens_s=90.0, closes_s=110.0, busy_s=None):
        self.bubble = Bubble(7, 1, opens_s, closes_s)
        self.now_s, self.busy_s, self.waits = NOW_S, busy_s, []

    def state(self):
        return BoardState(self.now_s, True, "", 7, 0.0, self.bubble, 0)

    def wait(self, state, timeout_s):
        self.waits.append(timeout_s)

    def busy_from(self, start_s, end_s):
        return self.busy_s


class Cost:
    """Grants the tokens that a test sets, and records calls."""

    def __init__(self, tokens=0, steps=TRUSTED):
        self.tokens, self.steps, self.asked, self.told = tokens, steps, [], []

    def tokens_within(self, *asked):
        self.asked.append(asked)
        return self.tokens

    def observe(self, *told):
        self.told.append(told)


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: NOW_S, sleep=None))
    return Gate([Board()], Cost(), guard_s=0.5)


@pytest.mark.parametrize(("last_end_s", "gap_s"), [(99.25, 0.75), (100.0, 0.0), (100.5, 0.0)])
def test_the_cost_model_is_asked_for_what_is_left_less_the_guard(gate, last_end_s, gap_s):
    gate.boards.append(Board(92.0, 104.0))
    gate.last_end_s = last_end_s
    gate.cost.tokens = 321
    assert gate.grant(1000, 55) == (321, Opening(92.0, 104.0, 7, 1))
    assert gate.cost.asked == [(3.5, 55, gap_s, 1000)]
    assert gate.grant(0, 55) == (0, Opening(92.0, 104.0, 7, 1)) and len(gate.cost.asked) == 1


@pytest.mark.parametrize(
    ("wanted", "fit", "granted"),
    [
        (1000, MIN_TOKENS, MIN_TOKENS),
        (1000, MIN_TOKENS - 1, 0),
        (MIN_TOKENS, MIN_TOKENS - 1, 0),
        (MIN_TOKENS - 1, MIN_TOKENS - 1, MIN_TOKENS - 1),
        (1, 1, 1),
        (1, 0, 0),
    ],
)
def test_little_is_granted_only_where_it_is_the_rest(gate, wanted, fit, granted):
    gate.cost.tokens = fit
    assert gate.grant(wanted, 0)[0] == granted


@pytest.mark.parametrize(("wanted", "granted"), [(1000, MIN_TOKENS), (3, 3)])
def test_a_trial_is_of_few_tokens(gate, wanted, granted):
    gate.boards = [Board(99.0, 110.0)]
    gate.last_end_s = NOW_S - MIN_PAUSE_S
    assert gate.grant(wanted, 0)[0] == granted and gate._trials.closes_s == 110.0
    gate.last_end_s = NOW_S
    assert gate.grant(wanted, 0)[0] == 0 and not gate._trials.closes_s


def test_a_trial_has_a_pause_before_it_and_most_of_a_bubble_longer_than_two_guards(gate):
    whole = Opening(NOW_S, NOW_S + 8.0, 1, 0)
    for steps, pause_s in ((TRUSTED - 1, MIN_PAUSE_S), (TRUSTED, 4.0)):
        gate.cost.steps, gate._trials.pause_s = steps, 4.0
        for more_s in (-0.125, 0.0, 0.125):
            gate.last_end_s = NOW_S - pause_s - more_s
            assert gate._may_try(whole, NOW_S) == (more_s >= 0), (steps, more_s)
    gate.last_end_s = 0.0
    for begun_s, may in (
        (1.0, True),
        (8.0 * (1 - MIN_REMAINING) - 0.125, True),
        (8.0 * (1 - MIN_REMAINING) + 0.125, False),
    ):
        assert gate._may_try(Opening(NOW_S - begun_s, NOW_S - begun_s + 8.0, 1, 0), NOW_S) == may
    gate.guard_s = 4.0
    assert not gate._may_try(whole, NOW_S), "as long as two guards"
    gate.guard_s = 3.9375
    assert gate._may_try(whole, NOW_S)


@pytest.mark.parametrize(("start_s", "gap_s"), [(101.0, 1.0), (99.0, 0.0)])
def test_the_cost_model_learns_of_steps_but_the_first(gate, start_s, gap_s):
    gate.ended(90.0, 100.0, 16, 5)
    assert gate.cost.told == [] and gate.last_end_s == 100.0
    gate.ended(start_s, 104.0, 16, 5)
    assert gate.cost.told == [(16, 5, gap_s, 104.0 - start_s)] and gate.last_end_s == 104.0


def test_a_step_is_as_late_as_the_first_rank_says(gate):
    gate.boards = [Board(), Board(busy_s=103.0), Board(busy_s=102.0)]
    assert gate.ended(101.0, 104.0, 1, 0) == 2.0
    gate.boards = [Board(), Board()]
    assert gate.ended(101.0, 104.0, 1, 0) == 0.0


def test_pauses_double_when_late_and_halve_when_in_time_between_their_bounds(gate):
    pauses = []
    for late in [True] * 8 + [False] * 8:
        gate._trials.closes_s = 104.0
        gate.boards = [Board(busy_s=103.0 if late else None)]
        gate.ended(101.0, 104.0, 1, 0)
        pauses.append(gate._trials.pause_s)
    doubled = [min(MIN_PAUSE_S * 2**n, MAX_PAUSE_S) for n in range(1, 9)]
    assert pauses == doubled + [max(MAX_PAUSE_S / 2**n, MIN_PAUSE_S) for n in range(1, 9)]


def test_a_waker_announces_each_bubble_once_and_wakes_now_and_then(gate):
    woken = []
    with closing(Waker(gate, lambda: woken.append(gate.boards[0].now_s), period_s=10.0)) as waker:
        board = gate.boards[0]

        def check(now_s, bubble):
            board.now_s, board.bubble = now_s, bubble
            waker._check()

        first, second = Bubble(1, 0, 90.0, 110.0), Bubble(1, 1, 111.0, 115.0)
        check(100.0, first)
        check(101.0, first)
        check(109.9, Bubble(1, 0, 90.0, 200.0))
        assert woken == [100.0], "that it closes elsewhere does not make it another"
        check(110.0, first)
        assert woken == [100.0, 110.0], "for chores"
        check(111.0, second)
        check(111.5, None)
        check(111.6, second)
        assert woken == [100.0, 110.0, 111.0]
        check(121.0, None)
        assert woken == [100.0, 110.0, 111.0, 121.0]


@pytest.mark.parametrize(("boards", "period_s", "pause_s"), [(1, 10.0, CHECK_S), (2, 10.0, 0.005), (1, 0.125, 0.125)])
def test_with_several_boards_a_waker_looks_every_few_milliseconds(gate, boards, period_s, pause_s):
    gate.boards = [Board() for _ in range(boards)]
    with closing(Waker(gate, lambda: None, period_s=period_s)) as waker:
        waker._check()
    assert [board.waits for board in gate.boards] == [[pause_s]] + [[]] * (boards - 1)


def test_a_waker_without_work_is_not_armed(gate):
    gate.boards[0].state = lambda: BoardState(0.0, False, "none", 0, 0.0, None, 0)
    with closing(Waker(gate, lambda: None, period_s=1e9)) as waker:
        for has_work in (False, True, False):
            waker.arm(has_work)
            assert waker._armed.is_set() == has_work
