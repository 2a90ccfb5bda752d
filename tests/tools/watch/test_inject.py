"""The problems of MegaScale's section 6.3, injected into real runs, are named by the views, and no other rank is."""

import pytest

from benchmarks.inject import EXPECTED, HOST, RANKS, SLOWER, diagnosis, is_named, train_with
from weft.tools.ranks import run_ranks
from weft.tools.watch.outliers import outliers
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

STEPS = 50


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cause", EXPECTED)
def test_an_injected_cause_is_named_and_no_other_rank(tmp_path, cause):
    run_ranks(RANKS, train_with, cause, tmp_path, STEPS, timeout_s=550)
    record = RunRecord(tmp_path / "quickstart")
    assert record.step_range == (1, STEPS) and outliers(record, STEPS // 2 - 1) == []
    found, named = diagnosis(record)
    assert is_named(cause, named), named
    assert EXPECTED[cause][0] in [limit.kind for limit in found]
    shown = Views(record).show("heat")
    assert len(shown["outliers"] + shown["pauses"]) == len(named)
    for each in outliers(record):
        assert each.rank in HOST and each.share == pytest.approx(SLOWER - 1, abs=0.08)
