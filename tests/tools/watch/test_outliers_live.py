"""A slow rank of a real run is named, and no other."""

import pytest

from tests.quickstart import TINY_QUICKSTART
from tests.tools.watch.slowed import train_slowed
from weft.tools.ranks import run_ranks
from weft.tools.watch.outliers import outliers
from weft.tools.watch.record import RunRecord

STEPS, FIRST = 60, 40
SETTINGS = [*TINY_QUICKSTART, f"train.steps={STEPS}", "pipeline.stages=2", "cluster.ranks=4", "pipeline.microbatches=4"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_that_becomes_ten_percent_slower_is_the_only_one_named_within_twenty_steps(tmp_path):
    run_ranks(4, train_slowed, SETTINGS, tmp_path, 3, 1.1, FIRST, timeout_s=350)
    record = RunRecord(tmp_path / "quickstart")
    assert record.step_range == (1, STEPS)
    assert outliers(record, FIRST - 1) == []
    found = outliers(record)
    assert [(each.rank, each.section) for each in found] == [(3, "compute")]
    assert found[0].share == pytest.approx(0.1, abs=0.04)
