"""A plan's memory is what the ranks take: the quickstart in four layouts."""

import pytest

from weft.tools.benchmarks.predictions.memory import LAYOUTS, NUM_RANKS, peaks
from weft.tools.ranks import run_ranks


@pytest.mark.slow
def test_predicted_memory_is_the_measured_one():
    found = [peak for rank in run_ranks(NUM_RANKS, peaks, timeout_s=240) for peak in rank]
    assert len(found) == NUM_RANKS * len(LAYOUTS)
    for peak in found:
        assert abs(peak.error) < 0.1, peak
