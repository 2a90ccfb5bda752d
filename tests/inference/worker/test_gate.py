"""The gate: nothing is granted outside of bubbles, and nothing that would not fit."""

import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from weft.inference.board.common_bubbles import Opening
from weft.inference.board.reader import BoardReader
from weft.inference.board.writer import BoardWriter, board_path
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost, gap_class
from weft.inference.worker.gate import MAX_PAUSE_S, MIN_PAUSE_S, MIN_TOKENS, Gate, Trials, Waker
from weft.inference.worker.status import WorkerStatus, problem_of


@pytest.fixture
def writer(tmp_path, monkeypatch):
    """Three steps with a bubble of a minute each have been; the next begins when a test says so."""
    ahead_s = 0.0
    monkeypatch.setattr("weft.inference.board.writer.monotonic_ns", lambda: time.monotonic_ns() + round(ahead_s * 1e9))
    writer = BoardWriter(board_path(tmp_path / "boards", 0), rank=0, plan=[], max_edges=16)
    for minutes in (-6, -4, -2):
        ahead_s = 60.0 * minutes
        writer.begin(8)
        ahead_s += 60.0
        writer.busy()
    ahead_s = 0.0
    yield writer
    writer.close()


@pytest.fixture
def gate(writer):
    cost = PrefillCost()
    for tokens in range(16, 416, 4):
        cost.observe(tokens, 0, 0.0, 0.001 + tokens * 1e-4)
    return Gate([BoardReader(writer.path)], cost, guard_s=0.01)


def test_nothing_is_granted_while_the_rank_computes(writer, gate):
    assert gate.grant(1000, 0) == (0, None)


def test_what_is_granted_fits_the_bubble_less_the_guard(writer, gate):
    writer.begin(8)
    tokens, found = gate.grant(10**6, 0)
    assert found is not None and tokens > MIN_TOKENS
    assert gate.cost.predict_s(tokens, 0, 0.0) <= found.closes_s - found.opened_s - gate.guard_s


def test_what_is_attended_to_counts(writer, gate):
    for tokens in range(16, 416, 4):
        for context in (0, 2000, 8000):
            gate.cost.observe(tokens, context, 0.0, 0.001 + tokens * 1e-4 + 1e-7 * tokens * (context + tokens / 2))
    writer.begin(8)
    alone, _ = gate.grant(10**6, 0)
    behind, found = gate.grant(10**6, 8000)
    assert 0 < behind < alone
    assert gate.cost.predict_s(behind, 8000, 0.0) <= found.closes_s - found.opened_s - gate.guard_s


def test_a_short_rest_is_granted_and_a_short_piece_of_much_is_not(writer, gate):
    writer.begin(8)
    assert gate.grant(3, 0)[0] == 3
    bubble = gate.boards[0].state().bubble
    gate.guard_s = bubble.closes_s - time.monotonic() - gate.cost.predict_s(MIN_TOKENS - 1, 0, 0.0)
    assert gate.grant(10**6, 0)[0] == 0


def test_a_guard_longer_than_the_bubble_grants_nothing(writer, gate):
    gate.guard_s = 61.0
    writer.begin(8)
    assert gate.grant(1000, 0)[0] == 0


def test_costs_that_are_believed_too_high_are_tried_now_and_then(writer, gate):
    gate.cost = PrefillCost()
    too_long = 10**9
    writer.begin(8)
    assert gate.cost.predict_s(MIN_TOKENS, too_long, 0.0) > 60.0
    gate.last_end_s = time.monotonic() + 60.0
    assert gate.grant(1000, too_long)[0] == 0
    gate.last_end_s = time.monotonic() - MIN_PAUSE_S
    assert gate.grant(1000, too_long)[0] == MIN_TOKENS


def test_trials_that_end_in_time_follow_each_other_and_late_ones_pause(writer, gate, monkeypatch):
    """A worker that learnt its costs while the host was busy goes on, and less often where training waits for it."""
    shortest_s = 1e4  # longer than a slow machine takes between two lines
    monkeypatch.setattr("weft.inference.worker.gate.MIN_PAUSE_S", shortest_s)
    monkeypatch.setattr("weft.inference.worker.gate.MAX_PAUSE_S", 100 * shortest_s)
    gate._trials = Trials()

    def tried_after(pause_s):
        gate.last_end_s = time.monotonic() - pause_s
        return gate.grant(1000, too_long)[0] >= MIN_TOKENS

    too_long = 10**9
    writer.begin(8)
    now_s = time.monotonic()
    in_time, late = (now_s, now_s), (now_s - 270.0, now_s - 269.0)  # the last step's work began five minutes ago
    assert gate.boards[0].busy_from(*late) and not gate.boards[0].busy_from(*in_time)
    pauses = [(1, late), (2, late), (4, late), (8, in_time), (4, in_time), (2, in_time), (1, in_time), (1, in_time)]
    for factor, step in pauses:
        assert not tried_after(0.5 * factor * shortest_s)
        assert tried_after(factor * shortest_s)
        gate.ended(*step, 0, 0)


@pytest.mark.parametrize(("steps", "granted"), [(TRUSTED - 1, MIN_TOKENS), (TRUSTED, 0)])
def test_trials_pause_once_costs_are_trusted(writer, gate, steps, granted):
    gate.cost = SimpleNamespace(steps=steps, tokens_within=lambda *_: 0)
    gate._trials.pause_s = 1e6
    writer.begin(8)
    gate.last_end_s = time.monotonic() - MIN_PAUSE_S
    assert gate.grant(1000, 0)[0] == granted


def test_only_trials_change_their_pause_and_it_has_an_end():
    trials = Trials()
    trials.ended(1.0, 2.0, 1.0)
    assert trials.pause_s == MIN_PAUSE_S
    for _ in range(10):
        trials.begin(1.0, 1.5)
        trials.ended(1.0, 2.0, 0.5)
    assert trials.pause_s == MAX_PAUSE_S and not trials.closes_s


def test_trials_that_use_little_of_their_bubbles_grow():
    """A prompt of 300 tokens took 9 s on a busy host, in trials of 16 tokens."""
    trials = Trials()

    def tried(now_s, took_s, late_s=0.0):
        tokens = trials.begin(now_s, now_s + 1.0)
        trials.ended(now_s, now_s + took_s, late_s)
        return tokens // MIN_TOKENS

    assert [tried(1.0 + n, took_s) for n, took_s in enumerate((0.1, 0.2, 0.6, 0.5, 0.1))] == [1, 2, 4, 4, 8]
    trials.ended(6.5, 6.6, 0.0)
    assert tried(7.0, 1.1, late_s=0.1) == 16, "steps by prediction change nothing"
    assert tried(8.0, 0.1) == 1 and tried(9.0, 0.1) == 2
    trials.ended(9.5, 9.6, 0.05)
    assert tried(10.0, 0.1) == 1, "a late step of any kind"
    assert tried(10.1 + 2 * MAX_PAUSE_S, 0.1) == 2 and tried(10.3 + 4 * MAX_PAUSE_S, 0.1) == 1, "long ago"


def test_a_dead_writer_grants_nothing_and_is_named(writer, gate):
    writer.begin(8)
    writer.path.unlink()
    assert gate.grant(1000, 0) == (0, None)
    assert "gone" in gate.why_not


def test_a_step_that_ran_into_work_was_late(writer, gate):
    writer.begin(8)
    start_s = time.monotonic()
    assert gate.ended(start_s, time.monotonic(), 10, 0) == 0.0
    writer.busy()
    time.sleep(0.01)
    assert gate.ended(start_s, time.monotonic(), 10, 0) >= 0.009


def test_a_step_that_outlasts_the_work_it_ran_into_was_late(writer, gate):
    """Training has long gone on to its next bubble when the step ends."""
    writer.begin(8)
    start_s = time.monotonic()
    time.sleep(0.01)
    writer.busy()
    met_s = gate.boards[0].state().busy_since_s
    writer.idle()
    time.sleep(0.01)
    end_s = time.monotonic()
    assert gate.ended(start_s, end_s, 10, 0) == pytest.approx(end_s - met_s)
    writer.begin(8)
    later_s = time.monotonic()
    assert gate.ended(start_s, later_s, 10, 0) == pytest.approx(later_s - met_s)
    assert gate.ended(later_s, time.monotonic(), 10, 0) == 0.0


def test_the_first_step_of_a_process_teaches_nothing(writer):
    gate = Gate([BoardReader(writer.path)], PrefillCost(), guard_s=0.01)
    now_s = time.monotonic()
    gate.ended(now_s - 6.7, now_s, 16, 0)
    assert gate.cost.steps == 0
    gate.ended(now_s, now_s + 0.02, 16, 0)
    assert gate.cost.steps == 1


def test_a_gate_needs_a_board():
    with pytest.raises(ValueError, match="name the board"):
        Gate([], PrefillCost(), guard_s=0.0)


def test_the_waker_wakes_for_a_bubble_and_only_while_armed(writer, gate):
    woken = threading.Event()
    with closing(Waker(gate, woken.set, period_s=1000.0)) as waker:
        writer.begin(8)
        assert not woken.wait(0.05)
        waker.arm(True)
        assert woken.wait(30.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [OSError("no futex"), SystemExit(1)])
def test_the_waker_outlives_what_it_meets(writer, gate, error, monkeypatch):
    """Errors do not end it; what does is noticed when there is work again."""
    monkeypatch.setattr("weft.inference.worker.gate.CHECK_S", 0.01)
    woken, failed = threading.Event(), threading.Event()
    with closing(Waker(gate, woken.set, period_s=1000.0)) as waker:
        board = gate.boards[0]

        def broken():
            failed.set()
            raise error

        board.state = broken
        waker.arm(True)
        assert failed.wait(30.0)
        if isinstance(error, SystemExit):
            waker._thread.join(30.0)
        del board.state
        writer.begin(8)
        waker.arm(True)
        assert woken.wait(30.0)


def test_the_waker_says_that_it_looks_and_when_it_wakes(writer, gate, tmp_path):
    status = WorkerStatus(tmp_path / "boards" / "worker0.status")
    status.serve()
    woken = threading.Event()
    with closing(Waker(gate, woken.set, period_s=1000.0, status=status)) as waker:
        waker.arm(True)
        writer.begin(8)
        assert woken.wait(30.0)
        # The loop has not run since it was woken.
        hours = time.monotonic_ns() + 7200 * 10**9
        assert "has not responded" in problem_of(tmp_path / "boards" / "worker0.status", hours)
        status.looped()
        assert "has not run" in problem_of(tmp_path / "boards" / "worker0.status", hours)


def poisoned(gate, gap_s):
    """Steps after ``gap_s`` of idle time are believed to take longer than any bubble; others are not."""
    slow = gap_class(gap_s)
    gate.cost = SimpleNamespace(
        steps=TRUSTED,
        tokens_within=lambda seconds, context, gap_s, most: 0 if gap_class(gap_s) == slow else most,
        observe=lambda *_: None,
    )


@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.05, 1.0])
def test_every_class_of_idle_time_gets_trials(writer, gate, monkeypatch, gap_s):
    """Also those shorter than the pause between trials, while steps of other classes go on."""
    poisoned(gate, gap_s)
    writer.begin(8)
    opened_s = gate.boards[0].state().bubble.opens_s
    now_s = opened_s + min(gap_s, 0.001)
    monkeypatch.setattr("weft.inference.worker.gate.time", SimpleNamespace(monotonic=lambda: now_s))
    gate._class_end_s = [now_s] * len(gate._class_end_s)
    gate.last_end_s = now_s - gap_s
    assert gate.grant(1000, 0)[0] == (MIN_TOKENS if gap_s >= MIN_PAUSE_S else 0)
    gate._class_end_s[gap_class(now_s - gate.last_end_s)] = now_s - MIN_PAUSE_S
    assert gate.grant(1000, 0)[0] == MIN_TOKENS


def test_a_class_that_only_follows_other_steps_is_tried_where_two_more_fit(writer, gate):
    poisoned(gate, 0.0)
    writer.begin(8)
    start_s = time.monotonic()
    gate.ended(start_s, time.monotonic(), 16, 0)
    bubble = gate.boards[0].state().bubble
    gate._class_end_s[0] -= MIN_PAUSE_S
    # Most of the bubble is over.
    opening = Opening(bubble.opens_s - 100.0, bubble.closes_s, 1, 1)
    assert gate._may_try(opening, gate.last_end_s)
    gate._last_s = bubble.closes_s - gate.last_end_s
    assert not gate._may_try(opening, gate.last_end_s)


def test_the_time_in_which_a_step_was_stopped_is_no_cost(writer, gate):
    learnt = []
    gate._warm = True
    gate.cost = SimpleNamespace(observe=lambda *step: learnt.append(step))
    now_s = time.monotonic()
    gate.ended(now_s - 5.0, now_s, 16, 0, 0.01)
    gate.ended(now_s, now_s + 0.02, 16, 0)
    assert [seconds for *_, seconds in learnt] == [0.01, pytest.approx(0.02)]
