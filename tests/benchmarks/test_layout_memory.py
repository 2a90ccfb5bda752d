"""A plan's memory is what the ranks take: the quickstart in several layouts, also with a vocabulary of 128k."""

from dataclasses import replace

import pytest

from benchmarks.memory import LAYOUTS, NUM_RANKS, peaks


def _short(config):
    """Return the configuration with as many micro-batches as stages at most: with more, ranks hold no more."""
    return replace(config, pipeline=replace(config.pipeline, microbatches=4))


@pytest.mark.slow
def test_predicted_memory_is_the_measured_one():
    found = [peak for ranks in peaks(120, _short) for peak in ranks]
    assert len(found) == NUM_RANKS * len(LAYOUTS)
    for peak in found:
        assert abs(peak.error) < 0.1, peak
