"""Preparing a batch reads no value from the device."""

import pytest
import torch
from transformers import masking_utils

from weft.engine.execution.batches import prepare_batch
from weft.engine.models.batch import count_label_tokens, label_tokens
from weft.engine.stages.cutting.context import whole_batch

CPU = torch.device("cpu")
META = torch.device("meta")
"""A device whose values cannot be read."""


def _batch(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.arange(12).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, 4:] = int(not padded)
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def test_a_mask_is_looked_at_before_it_is_moved():
    assert "attention_mask" not in prepare_batch(_batch(padded=False), META)
    found = prepare_batch(_batch(padded=True), META)
    assert found["attention_mask"].device == found["position_ids"].device == META


@pytest.mark.parametrize("padded", [False, True])
def test_objective_gets_the_batch_as_the_loader_made_it(padded):
    """A mask of ones is kept from the layers alone: losses of others read ``inputs["attention_mask"]``."""
    batch = _batch(padded) | {"reference": torch.ones(2)}
    prepared = prepare_batch(batch, CPU, keep_whole=True)
    assert ("attention_mask" in prepared) == padded
    whole = whole_batch(prepared)
    assert whole.keys() == batch.keys() | {"position_ids"}
    assert all(torch.equal(whole[name], batch[name]) for name in batch)
    assert whole["labels"] is prepared["labels"]  # which carries the number of items


def test_what_is_on_the_device_already_is_taken_as_it_is():
    there = {name: tensor.to(META) for name, tensor in _batch(padded=False).items()}
    assert prepare_batch(there, META)["attention_mask"].device == META


def test_positions_skip_padding():
    batch = _batch(padded=True)
    batch["attention_mask"][1, :2] = 0
    assert prepare_batch(batch, torch.device("cpu"))["position_ids"].tolist() == [
        [0, 1, 2, 3, 3, 3],
        [0, 0, 0, 1, 2, 3],
    ]


def test_labels_are_counted_where_they_are():
    batch = _batch(padded=True)
    assert count_label_tokens(batch) == int(label_tokens(batch)) == 8
    assert label_tokens({"labels": batch["labels"].to(META)}).device == META


@pytest.mark.parametrize("packed", [False, True])
def test_packing_flag_gives_the_mask_that_reading_positions_gives(packed, monkeypatch):
    """Reading the positions would wait for the device on a GPU."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]) if packed else torch.arange(6).expand(2, 6)
    batch = prepare_batch({"input_ids": positions, "labels": positions, "position_ids": positions.clone()}, CPU)
    told = masking_utils.find_packed_sequence_indices(batch["position_ids"])
    looked = masking_utils.find_packed_sequence_indices(positions.clone())
    assert (told is None) == (looked is None) == (not packed)
    assert not packed or torch.equal(told, looked)
    if not packed:  # nothing of the tensor is read
        moved = prepare_batch({"input_ids": positions, "labels": positions}, META)
        assert masking_utils.find_packed_sequence_indices(moved["position_ids"]) is None
