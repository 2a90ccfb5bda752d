"""Data that ends inside a step."""

import pytest
import torch

from tests.engine.tiny import batches
from weft.engine.engine import DataEnded, WeftEngine


class Drawing:
    """As much of an engine as draws batches."""

    device = torch.device("cpu")
    global_steps = 4
    minimised = None
    _prepare = WeftEngine._prepare

    def __init__(self, batch_fn=None):
        self.batch_fn = batch_fn


def test_data_that_ends_inside_a_step_says_so():
    engine = Drawing()
    data = [batch for batch, _ in zip(batches(0, 1), range(5), strict=False)]
    assert len(WeftEngine._draw(engine, iter(data), 5, "train_batch")) == 5
    with pytest.raises(DataEnded, match="train_batch: the data ended after 5 of the 8 micro-batches of step 5"):
        WeftEngine._draw(engine, iter(data), 8, "train_batch")


@pytest.mark.parametrize("data", [[], None, (), range(3)])
def test_what_would_begin_anew_in_each_step_is_refused(data):
    with pytest.raises(ValueError, match=r"it reads from an iterator, and got .*; pass the same iter\(\.\.\.\)"):
        WeftEngine._draw(Drawing(), data, 1, "train_batch")


def test_batches_pass_through_the_function_that_was_set():
    engine = Drawing(lambda batch: batch | {"labels": batch["labels"] * 0})
    (drawn,) = WeftEngine._draw(engine, batches(0, 1), 1, "train_batch")
    assert not drawn["labels"].any()


def test_a_loop_that_waits_for_the_end_still_ends():
    """DeepSpeed lets StopIteration through, and scripts rest on it."""
    assert issubclass(DataEnded, StopIteration) and issubclass(DataEnded, ValueError)
    with pytest.raises(StopIteration):
        raise DataEnded("over")
