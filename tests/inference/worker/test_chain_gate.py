"""Tests of a pipeline's grants: as those of one gate for one stage, and inside the bubbles of all stages otherwise."""

from types import SimpleNamespace

import pytest

from weft.inference.board.reader import BoardState, Bubble
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.worker import chain_gate, gate
from weft.inference.worker.chain_gate import HOP_S, ChainGate
from weft.inference.worker.gate import MIN_TOKENS, Gate

NOW_S = 100.0
GUARD_S = 0.004


class Board:
    """A board with the bubbles that a test sets, which may be open."""

    def __init__(self, *bubbles):
        self.bubbles = list(bubbles)

    def state(self):
        opens_s, closes_s = self.bubbles[0]
        found = Bubble(7, 1, opens_s, closes_s) if opens_s <= NOW_S else None
        return BoardState(NOW_S, True, "", 7, 0.0, found, 0)

    def upcoming(self, horizon_s, *, is_cautious):
        return [(max(opens_s, NOW_S), closes_s) for opens_s, closes_s in self.bubbles]

    def busy_from(self, start_s, end_s):
        return None


def learnt(token_s):
    cost = PrefillCost(quantile=0.9)
    for tokens in range(64, 64 * 40, 64):
        for gap_s in (0.0, 0.003, 0.01, 0.05, 0.2, 1.0):
            cost.observe(tokens, 0, gap_s, 0.002 + token_s * tokens)
    assert cost.steps > TRUSTED
    return cost


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    for module in (gate, chain_gate):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: NOW_S))


def chain(*boards, token_s=1e-4):
    return ChainGate([Gate([board], learnt(token_s), guard_s=GUARD_S) for board in boards])


def test_one_stage_grants_what_its_gate_grants():
    board = Board((99.9, 100.08))
    alone, of_one = Gate([board], learnt(1e-4), guard_s=GUARD_S), chain(board)
    for wanted in (1, 15, 16, 300, 5000):
        assert of_one.grant(wanted, 0) == alone.grant(wanted, 0)


def test_the_shortest_bubble_of_a_stage_bounds_the_grant():
    tokens, _ = chain(Board((99.9, 101.0)), Board((101.2, 101.26)), Board((101.5, 103.0))).grant(5000, 0)
    alone = learnt(1e-4).tokens_within(0.06 - GUARD_S, 0, 1.2, 5000)
    assert tokens == pytest.approx(alone, abs=2)
    assert 0 < tokens < learnt(1e-4).tokens_within(1.0, 0, 0.0, 5000)


def test_a_stage_waits_for_a_bubble_that_is_long_enough():
    short, long = (100.2, 100.21), (101.0, 102.0)
    tokens, _ = chain(Board((99.9, 100.1)), Board(short, long)).grant(5000, 0)
    assert tokens == chain(Board((99.9, 100.1)), Board(long)).grant(5000, 0)[0] > MIN_TOKENS


def test_nothing_is_granted_if_a_stage_has_no_bubble():
    assert chain(Board((99.9, 100.1)), Board((200.0, 200.001))).grant(5000, 0)[0] == 0


def test_a_chunk_behind_another_gets_what_that_one_has_left():
    gates = chain(Board((99.9, 100.2)), Board((100.4, 100.8)))
    most, opening = gates.grant(5000, 0)
    gates.began(most // 2, 0, opening.closes_s)
    assert gates.predicted_s is not None and len(gates.predicted_s) == 2
    rest, _ = gates.grant(5000, 0)
    assert 0 < rest < most
    gates.began(rest, 0, opening.closes_s)
    assert gates.grant(5000, 0)[0] == 0
    first_s, second_s = gates.predicted_s
    assert gates.ended([(100.0, 100.0 + first_s, None), (100.4, 100.4 + second_s, None)]) == 0.0
    assert first_s + HOP_S < 0.2


def test_a_trial_waits_until_the_pipeline_is_empty():
    gates = chain(Board((99.99, 104.0)), Board((100.0, 104.0)), token_s=1.0)
    for each in gates.gates:
        each.last_end_s = 0.0
        each._class_end_s = [0.0] * len(each._class_end_s)
    tokens, opening = gates.grant(5000, 0)
    assert tokens == MIN_TOKENS
    gates.began(tokens, 0, opening.closes_s)
    assert gates.grant(5000, 0)[0] == 0
