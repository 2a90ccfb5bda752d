"""Tests of a stage's gate: what begins at once, what waits for another bubble, and what ends a wait."""

from types import SimpleNamespace

import pytest

from weft.inference.board.reader import BoardState, Bubble
from weft.inference.worker import stage_gate
from weft.inference.worker.stage_gate import PATIENCE_S, StageGate

GUARD_S = 0.01
STEP_S = 1.0
SHORT, LONG = (0.1, 0.2), (0.5, 0.9)


class Board:
    """A board whose rank is idle in the same two bubbles of each step. Waiting for a mark moves the clock to it."""

    path = SimpleNamespace(name="rank0.board")

    def __init__(self, now_s):
        self.now_s, self.alive, self.ended = now_s, True, False

    def state(self):
        step, phase_s = divmod(self.now_s, STEP_S)
        found = [(opens_s, closes_s) for opens_s, closes_s in (SHORT, LONG) if opens_s <= phase_s < closes_s]
        begin_s = step * STEP_S
        bubble = Bubble(int(step), 0, begin_s + found[0][0], begin_s + found[0][1]) if found and self.alive else None
        return BoardState(self.now_s, self.alive, "", int(step), 0.0, bubble, 0)

    def upcoming(self, horizon_s, *, is_cautious):
        return [SHORT, LONG]

    def wait(self, state, timeout_s):
        step, phase_s = divmod(self.now_s, STEP_S)
        edges = sorted(edge for edge in (*SHORT, *LONG, STEP_S + SHORT[0]) if edge > phase_s + 1e-9)
        self.now_s = step * STEP_S + min(edges[0], phase_s + timeout_s)


@pytest.fixture
def begins(monkeypatch):
    def of(now_s, seconds, **attributes):
        board = Board(now_s)
        vars(board).update(attributes)
        monkeypatch.setattr(stage_gate, "time", SimpleNamespace(monotonic=lambda: board.now_s))
        StageGate(board, guard_s=GUARD_S).wait(seconds)
        return board.now_s

    return of


@pytest.mark.parametrize(
    ("now_s", "seconds", "begin_s"),
    [
        (0.1, 0.05, 0.1),  # fits
        (0.135, 0.05, 0.135),
        (0.15, 0.05, 0.5),  # fits, but for the guard
        (0.3, 0.05, 0.5),  # its rank trains
        (0.1, 0.3, 0.5),  # fits the longer one only
        (0.7, 0.3, 1.5),
    ],
)
def test_a_chunk_begins_in_the_first_bubble_that_it_fits(begins, now_s, seconds, begin_s):
    assert begins(now_s, seconds) == pytest.approx(begin_s)


def test_a_chunk_that_fits_nowhere_begins_the_longest_bubble_after_a_while(begins):
    assert begins(0.3, 5.0) == pytest.approx(0.5 + PATIENCE_S)


def test_a_chunk_waits_while_training_is_silent_and_not_once_it_has_ended(begins, monkeypatch):
    assert begins(0.3, 0.05, alive=False, ended=True) == pytest.approx(0.3)
    waits = []

    def wait(board, state, timeout_s):
        waits.append(timeout_s)
        board.now_s += 100.0
        board.alive = len(waits) > 3

    monkeypatch.setattr(Board, "wait", wait)
    assert begins(0.5, 0.05, alive=False) == pytest.approx(400.5)
