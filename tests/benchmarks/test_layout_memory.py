"""A plan's memory is what the ranks take: the quickstart in several layouts, also with a vocabulary of 128k."""

from dataclasses import replace

import pytest

from benchmarks.memory import LAYOUTS, NUM_RANKS, QLORA, TIMEOUT_S, peaks


def _short(config):
    """Return the configuration with as many micro-batches as stages at most: with more, ranks hold no more."""
    return replace(config, pipeline=replace(config.pipeline, microbatches=4))


def require_predicted(layout):
    (found,) = peaks(TIMEOUT_S, _short, [layout])
    assert len(found) == NUM_RANKS
    for peak in found:
        assert abs(peak.error) < 0.1, peak


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_predicted_memory_is_the_measured_one(layout):
    require_predicted(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", QLORA, ids=" ".join)
def test_predicted_memory_over_4_bit_weights_is_the_measured_one(layout):
    pytest.importorskip("bitsandbytes")
    require_predicted(layout)
