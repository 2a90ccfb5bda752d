"""A worker on several ranks runs only where all of them idle."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.conf.schema import WeftConfig
from weft.inference.board.common_bubbles import CommonBubbles, intersection, opening
from weft.inference.board.reader import BoardReader, BoardState, Bubble
from weft.inference.board.writer import BoardWriter, board_path
from weft.inference.placement.prefill_cost import PrefillCost
from weft.inference.worker.command import addresses, workers_of
from weft.inference.worker.gate import Gate

bubbles = st.none() | st.tuples(st.floats(0, 10), st.floats(10, 20))


@given(st.lists(bubbles, min_size=1, max_size=4))
def test_a_group_of_ranks_is_open_where_all_are(spans):
    states = [BoardState(10.0, True, "", 5, 0.0, None if span is None else Bubble(5, 0, *span), 0) for span in spans]
    found = opening(states)
    if None in spans:
        assert found is None
    else:
        assert found is not None
        assert all(span[0] <= found.opened_s and found.closes_s <= span[1] for span in spans)
        assert found.closes_s in [span[1] for span in spans]


def spans_of(points):
    return list(zip(points[::2], points[1::2], strict=False))


@given(*[st.lists(st.integers(0, 30), max_size=12, unique=True).map(sorted).map(spans_of)] * 2)
def test_common_time_is_that_of_sets(one, other):
    def seconds(spans):
        return {second for start, end in spans for second in range(start, end)}

    found = intersection(one, other)
    assert seconds(found) == seconds(one) & seconds(other)
    assert found == sorted(found)


@pytest.fixture
def writers(tmp_path, monkeypatch):
    """Two ranks that have had three steps with a bubble each: of a minute, and of 40 s that opens 10 s later."""
    at_s = 0.0
    monkeypatch.setattr("weft.inference.board.writer.monotonic_ns", lambda: time.monotonic_ns() + round(at_s * 1e9))
    folder = tmp_path / "boards"
    writers = [BoardWriter(board_path(folder, rank), rank=rank, plan=[], max_edges=16) for rank in range(2)]
    for minute in (-3, -2, -1):
        at_s = 60.0 * minute
        for writer in writers:
            writer.begin(8)
        writers[1].busy()
        at_s += 10.0
        writers[1].idle()
        at_s += 40.0
        writers[1].busy()
        at_s += 10.0
        writers[0].busy()
    at_s = 0.0
    yield writers
    for writer in writers:
        writer.close()


def test_a_worker_on_two_ranks_runs_only_where_both_idle(writers):
    boards = [BoardReader(writer.path) for writer in writers]
    gate, common = Gate(boards, PrefillCost(), guard_s=0.01), CommonBubbles(boards)
    for writer in writers:
        writer.begin(8)
    writers[1].busy()
    assert boards[0].state().bubble is not None
    assert gate.grant(1000, 0) == (0, None)
    ((start_s, end_s), *_) = common.upcoming(60.0)
    assert end_s - start_s == pytest.approx(40.0, abs=5.0)
    writers[1].idle()
    tokens, found = gate.grant(1000, 0)
    assert tokens > 0 and found is not None
    assert found.closes_s - found.opened_s == pytest.approx(40.0, abs=5.0)
    writers[0].busy()
    assert gate.grant(1000, 0) == (0, None)
    writers[1].path.unlink()
    assert common.upcoming(60.0) == []
    assert gate.grant(1000, 0) == (0, None) and "rank1.board: the board is gone" in gate.why_not


def test_the_controller_gets_every_rank_of_a_worker():
    config = WeftConfig()
    config.cluster.ranks, config.inference.prefill.ranks_per_worker = 4, 2
    config.inference.prefill.model = "tiny/llama"
    for worker, address in zip(workers_of(config), addresses(config), strict=True):
        assert address.boards == [str(board) for board in worker.boards] and len(address.boards) == 2
