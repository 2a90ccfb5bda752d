"""Memory under caps that need recomputation or offload is what the plan predicts."""

import pytest

from benchmarks.caps import CASES, NUM_RANKS, capped
from weft.tools.ranks import run_ranks


def all_peaks():
    return [capped(*case, 2, emulated=False) for case in CASES.values()]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_predicted_memory_under_four_caps_is_measured_within_5_percent():
    for found in run_ranks(NUM_RANKS, all_peaks, timeout_s=180):
        assert [abs(case.error) < 0.05 for case in found] == [True] * len(CASES), found
        assert [case.offloads > 0 for case in found] == ["offload" in str(settings) for _, settings in CASES.values()]
