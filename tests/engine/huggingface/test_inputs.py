"""A Trainer's checkpoint records which data and tokenizer it was trained with."""

import pytest
from datasets import Dataset

from tests.engine.huggingface.runs import Sequences, Streamed
from weft.engine.checkpoint.origin import Origin
from weft.engine.data.tokenizer import train_bpe
from weft.engine.huggingface.inputs import inputs_of

ROWS = Dataset.from_dict({"input_ids": [[n, n + 1] for n in range(8)]})


@pytest.mark.parametrize(
    ("other", "listed"),
    [
        (Dataset.from_dict({"input_ids": [[n, n + 1] for n in range(8)]}), False),
        (ROWS.with_format("numpy"), False),
        (ROWS.select(range(7)), True),
        (ROWS.select(range(7, -1, -1)), True),
    ],
)
def test_other_rows_of_a_dataset_are_listed_on_resume(other, listed):
    saved = Origin(inputs=inputs_of(ROWS, None)).to_tree()
    found = Origin(inputs=inputs_of(other, None)).differences(saved)
    assert found == (["other content of train_dataset"] if listed else [])


def test_data_that_may_draw_random_numbers_are_not_read():
    class Random(Sequences):
        def __getitem__(self, index):
            raise AssertionError("read")

    assert inputs_of(Random(8), None) == inputs_of(Sequences(8), None) != inputs_of(Sequences(9), None)
    assert inputs_of(Streamed(8), None) == inputs_of(None, None) == {}


def test_another_tokenizer_is_listed_on_resume():
    one, other = (inputs_of(None, train_bpe(["to be or not to be"] * 9, size)) for size in (260, 264))
    assert Origin(inputs=other).differences(Origin(inputs=one).to_tree()) == ["other content of processing_class"]
