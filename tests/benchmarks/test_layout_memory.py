"""A plan's memory is what the ranks take: the quickstart in several layouts, also with a vocabulary of 128k."""

from dataclasses import replace

import pytest

from benchmarks.memory import LAYOUTS, NUM_RANKS, QLORA, peaks


def _short(config):
    """Return the configuration with as many micro-batches as stages at most: with more, ranks hold no more."""
    return replace(config, pipeline=replace(config.pipeline, microbatches=4))


def require_predicted(layouts):
    found = [peak for ranks in peaks(120, _short, layouts) for peak in ranks]
    assert len(found) == NUM_RANKS * len(layouts)
    for peak in found:
        assert abs(peak.error) < 0.1, peak


@pytest.mark.slow
def test_predicted_memory_is_the_measured_one():
    require_predicted(LAYOUTS)


@pytest.mark.slow
def test_predicted_memory_over_4_bit_weights_is_the_measured_one():
    pytest.importorskip("bitsandbytes")
    require_predicted([QLORA])
