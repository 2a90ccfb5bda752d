"""The engine publishes when it computes, and computes the same whether it does or not."""

import pytest

from tests.engine.parallel.axis_training import pair_config
from tests.engine.tiny import tiny_config
from tests.inference.board.board_training import train_and_read
from weft.tools.ranks import run_ranks

STEPS = 4


@pytest.mark.slow
def test_the_board_shows_the_steps_that_were_trained(tmp_path):
    for rank in told(2, tiny_config(stages=2, microbatches=4), tmp_path):
        assert len(rank["marks"]) >= 8  # a forward and a backward of each micro-batch


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_interleaved_pair_is_work_from_its_begin_to_its_end(tmp_path):
    """Also while its strands wait for collectives, as any forward does."""
    for rank in told(4, pair_config("always", str(tmp_path / "cache"), tensor=2, stages=2), tmp_path):
        assert rank["pairs"] >= 2


def told(num_ranks, config, folder):
    """Return the boards of a run, which are compared with the engine's own marks."""
    silent = run_ranks(num_ranks, train_and_read, config, STEPS)
    config.inference.enabled, config.inference.boards = True, str(folder / "boards")
    told = run_ranks(num_ranks, train_and_read, config, STEPS)
    assert [rank["losses"] for rank in told] == [rank["losses"] for rank in silent]
    assert not any(rank["work"] for rank in silent)
    for rank in told:
        assert rank["gone"] and rank["predicted"]
        # The board's marks stand around the engine's own, and in the same order.
        for (start, end), (busy, idle) in zip(rank["marks"], rank["work"], strict=False):
            assert busy <= start <= end <= idle
        assert len(rank["work"]) > len(rank["marks"])
    return told
