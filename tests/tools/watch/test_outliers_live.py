"""A slow rank of a real run is named, and no other."""

import pytest

from benchmarks.inject import RANKS, train_with
from weft.tools.ranks import run_ranks
from weft.tools.watch.outliers import outliers
from weft.tools.watch.record import RunRecord

STEPS, FIRST = 60, 30


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_that_becomes_ten_percent_slower_is_the_only_one_named_within_twenty_steps(tmp_path):
    run_ranks(RANKS, train_with, "host", tmp_path, STEPS, (3,), 1.1, timeout_s=350)
    record = RunRecord(tmp_path / "quickstart")
    assert record.step_range == (1, STEPS)
    assert outliers(record, FIRST - 1) == []
    found = outliers(record, FIRST + 19)
    assert [(each.rank, each.section) for each in found] == [(3, "compute")]
    assert found[0].share == pytest.approx(0.1, abs=0.04)
