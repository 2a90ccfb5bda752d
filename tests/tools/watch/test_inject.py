"""The problems of MegaScale's section 6.3, injected into real runs, are named by the views, and no other rank is."""

import pytest

from benchmarks.inject import EXPECTED, HOST, RANKS, SLOWER, diagnosis, is_named, train_with
from weft.tools.ranks import run_ranks
from weft.tools.watch.outliers import WINDOW, outliers
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

STEPS = 50


def train(cause, folder, *slow):
    """Train with an injected cause, on clocks that the load of this machine does not change."""
    run_ranks(RANKS, train_with, cause, folder, STEPS, *(slow or (HOST, SLOWER)), True, timeout_s=550)
    record = RunRecord(folder / "quickstart")
    assert record.step_range == (1, STEPS) and outliers(record, STEPS // 2 - 1) == []
    return record


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cause", EXPECTED)
def test_an_injected_cause_is_named_and_no_other_rank(tmp_path, cause):
    record = train(cause, tmp_path)
    found, named = diagnosis(record)
    assert is_named(cause, named), named
    assert EXPECTED[cause][0] in [limit.kind for limit in found]
    shown = Views(record).show("heat")
    assert len(shown["outliers"] + shown["pauses"]) == len(named)
    for each in outliers(record):
        assert each.rank in HOST and each.share == pytest.approx(SLOWER - 1, abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_becomes_ten_percent_slower_is_the_only_one_named_within_twenty_steps(tmp_path):
    found = outliers(train("host", tmp_path, (3,), 1.1), STEPS // 2 + WINDOW - 1)
    assert [(each.rank, each.section) for each in found] == [(3, "compute")]
    assert found[0].share == pytest.approx(0.1, abs=0.02)
