"""The bench of predictions: its judgement, its layouts, and two of them run."""

from dataclasses import replace

import pytest

from benchmarks import prediction
from benchmarks.peers.layout import NUM_LAYERS
from benchmarks.prediction import LAYOUTS, MICROBATCHES, Predicted, judge, misranked, verdict
from weft.conf.checks import check

ONE = Predicted(name="one", predicted_s=1.0, measured_s=1.0, spread=0.0)


def steps(*pairs):
    return [replace(ONE, name=str(n), predicted_s=p, measured_s=m) for n, (p, m) in enumerate(pairs)]


def test_two_in_twelve_may_be_further_off_and_none_far():
    close = [(1.0 + n, 1.0 + n) for n in range(10)]
    assert judge(steps(*close, (20.9, 20.0), (31.2, 30.0)))
    assert not judge(steps(*close, (20.9, 20.0), (31.2, 30.0), (41.6, 40.0)))
    assert not judge(steps(*close, (21.1, 20.0)))


def test_the_ranking_counts_where_steps_differ():
    assert not misranked(steps((1.0, 1.01), (1.01, 1.0)))
    wrong = misranked(steps((1.0, 1.06), (1.01, 1.0)))
    assert [(one.name, other.name) for one, other in wrong] == [("1", "0")]
    assert "1 is measured faster than 0" in verdict(steps((1.0, 1.06), (1.01, 1.0)))[-1]


def test_layouts_are_of_one_model_and_batch():
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS) == 12
    for layout in LAYOUTS:
        assert layout.microbatches * layout.replicas == MICROBATCHES
        assert sum(layout.layers) in (0, NUM_LAYERS)
        check(layout.config("cache", timeout_s=60.0))
    assert {len(layout.sites) for layout in LAYOUTS} == {1, 2, 3}
    assert {layout.cell for layout in LAYOUTS} == {1, 2, 3}
    assert {layout.zero for layout in LAYOUTS} == {0, 1, 2}


def test_a_layout_that_is_not_there():
    with pytest.raises(ValueError, match="--only 13: there are 12 layouts"):
        prediction.main(["--only", "13"])
