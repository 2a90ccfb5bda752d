"""The engine publishes when it computes, and computes the same whether it does or not."""

import pytest

from tests.engine.observability.bubbles import train_and_read
from tests.engine.tiny import tiny_config
from weft.tools.ranks import run_ranks

STEPS = 4


@pytest.mark.slow
def test_the_board_shows_the_steps_that_were_trained(tmp_path):
    config = tiny_config(stages=2, microbatches=4)
    silent = run_ranks(2, train_and_read, config, STEPS)
    config.inference.enabled, config.inference.boards = True, str(tmp_path / "boards")
    told = run_ranks(2, train_and_read, config, STEPS)
    assert [rank["losses"] for rank in told] == [rank["losses"] for rank in silent]
    assert not any(rank["work"] for rank in silent)
    for rank in told:
        assert rank["gone"] and rank["predicted"]
        computed = [(start, end) for op, start, end in rank["marks"] if op in ("F", "B")]
        assert len(computed) >= 8  # a forward and a backward of each micro-batch
        # The board's marks stand around the engine's own, and in the same order.
        for (start, end), (busy, idle) in zip(computed, rank["work"], strict=False):
            assert busy <= start <= end <= idle
        assert len(rank["work"]) > len(computed)
