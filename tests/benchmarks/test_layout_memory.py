"""A plan's memory is what the ranks take: the quickstart in several layouts, also with a vocabulary of 128k."""

from dataclasses import replace

import pytest

from benchmarks.memory import LAYOUTS, NUM_RANKS, peaks
from weft.conf.schema import ScheduleKind


def _filled(config):
    """With as many micro-batches as (virtual) stages, each rank holds as much as with more of them.

    A rank without a pipeline has two: of the second, gradients are added to the first's.
    """
    pipeline = config.pipeline
    stages = pipeline.stages * (2 if pipeline.schedule in (ScheduleKind.w, ScheduleKind.zbv) else 1)
    return replace(config, pipeline=replace(pipeline, microbatches=max(2, stages)))


@pytest.mark.slow
def test_predicted_memory_is_the_measured_one():
    found = [peak for ranks in peaks(120, _filled) for peak in ranks]
    assert len(found) == NUM_RANKS * len(LAYOUTS)
    for peak in found:
        assert abs(peak.error) < 0.1, peak
