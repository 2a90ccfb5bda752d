"""Data that ends inside a step, or would begin anew in each."""

import pytest

from tests.engine.tiny import batches
from weft.engine.execution.batches import DataEnded, draw


def test_data_that_ends_inside_a_step_says_so():
    data = [batch for batch, _ in zip(batches(0, 1), range(5), strict=False)]
    assert len(draw(iter(data), 5, dict, what="train_batch, step 5")) == 5
    with pytest.raises(DataEnded, match="train_batch, step 5: the data ended after 5 of 8 micro-batches"):
        draw(iter(data), 8, dict, what="train_batch, step 5")


@pytest.mark.parametrize("data", [[], None, (), range(3)])
def test_what_would_begin_anew_in_each_step_is_refused(data):
    with pytest.raises(ValueError, match=r"it reads from an iterator, and got .*; pass the same iter\(\.\.\.\)"):
        draw(data, 1, dict, what="train_batch")


def test_batches_are_prepared():
    (drawn,) = draw(batches(0, 1), 1, lambda batch: batch | {"labels": batch["labels"] * 0}, what="train_batch")
    assert not drawn["labels"].any()


def test_a_loop_that_waits_for_the_end_still_ends():
    """DeepSpeed lets StopIteration through, and scripts rest on it."""
    assert issubclass(DataEnded, StopIteration) and issubclass(DataEnded, ValueError)
    with pytest.raises(StopIteration):
        raise DataEnded("over")
