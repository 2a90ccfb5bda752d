"""Replicas' shares of a stream, and schedules that an epoch's last step does not fill."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from weft.engine.huggingface.microbatches import IGNORED, EveryNthBatch, any_batch, check_inputs, filled


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("length", [0, 3, 8, 25])
def test_replicas_read_each_item_once_a_batch_at_a_time(length, batch_size, replicas):
    shares = [list(EveryNthBatch(Stream(length), batch_size, r, replicas)) for r in range(replicas)]
    assert sorted(item for share in shares for item in share) == list(range(length))
    batches = [list(range(length))[at : at + batch_size] for at in range(0, length, batch_size)]
    for replica, share in enumerate(shares):
        assert share == [item for batch in batches[replica::replicas] for item in batch]


@pytest.mark.parametrize("given", range(4))
def test_what_fills_a_schedule_has_no_labels(given):
    batches = [{"input_ids": torch.full((2, 3), m), "labels": torch.full((2, 3), m)} for m in range(given)]
    spare = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 3, dtype=torch.long)}
    found = list(filled(batches, spare, 3))
    assert found[:given] == batches
    assert len(found) == 3
    for batch in found[given:]:
        assert torch.equal(batch["input_ids"], spare["input_ids"])
        assert (batch["labels"] == IGNORED).all()
        assert batch["labels"].shape == spare["labels"].shape
    assert (spare["labels"] == 1).all()


@pytest.mark.parametrize("dataset", [[7, 8, 9], Stream(3), EveryNthBatch(Stream(3), 2, 3, 4)])
def test_a_replica_without_rows_borrows_the_first(dataset):
    """The last one has a replica whose share is empty."""
    loader = DataLoader(dataset, batch_size=2, collate_fn=lambda rows: {"labels": torch.tensor(rows)})
    first = 7 if isinstance(dataset, list) else 0
    assert torch.equal(any_batch(loader)["labels"], torch.tensor([first]))


def test_batches_without_labels_or_with_tokens_of_another_tokenizer_are_refused():
    ids = torch.tensor([[1, 2, 9]])
    check_inputs({"input_ids": ids, "labels": torch.tensor([[IGNORED, 2, 9]])}, 10)
    for batch, text in (
        ({"input_ids": ids, "attention_mask": ids}, "batches have attention_mask, input_ids and no labels"),
        ({"input_ids": ids + 1, "labels": ids}, "input_ids: token 10 is none of the model's 10"),
        ({"input_ids": ids, "labels": ids + 1}, "labels: token 10 is none"),
        ({"input_ids": ids - 2, "labels": ids}, "input_ids: token -1 is none"),
    ):
        with pytest.raises(ValueError, match=text):
            check_inputs(batch, 10)
