"""A plan's memory is what the ranks take: the quickstart in several layouts, also with a vocabulary of 128k."""

import pytest

from benchmarks.memory import LAYOUTS, NUM_RANKS, peaks


@pytest.mark.slow
def test_predicted_memory_is_the_measured_one():
    # With as many micro-batches as stages at most, each rank holds as much as with more of them.
    found = [peak for ranks in peaks(120, "pipeline.microbatches=4") for peak in ranks]
    assert len(found) == NUM_RANKS * len(LAYOUTS)
    for peak in found:
        assert abs(peak.error) < 0.1, peak
