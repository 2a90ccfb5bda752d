"""Preparing a batch reads no value from the device."""

import pytest
import torch
from transformers import masking_utils

from benchmarks.verification.shared_architectures import small_model
from weft.engine.execution.batches import prepare_batch
from weft.engine.models.batch import count_label_tokens, flash_arguments, label_tokens
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


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "opt", "roberta"])
def test_positions_are_those_of_the_models_own_forward(model_type):
    """Behind padding, OPT counts tokens, GPT-2 positions, and RoBERTa begins behind the padding's token."""
    model = small_model(model_type, 1).eval()
    batch = _batch(padded=True)
    batch["attention_mask"][1, :2] = 0
    batch["input_ids"] = (batch["input_ids"] + 3).where(batch["attention_mask"] == 1, model.config.pad_token_id or 0)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    prepared = prepare_batch(batch, CPU, model=model)
    seen = given["attention_mask"].bool()
    with torch.no_grad():
        found = model(**given, position_ids=prepared["position_ids"]).logits
        assert torch.equal(found[seen], model(**given).logits[seen])
    rows = flash_arguments(prepared["position_ids"])
    assert rows["cu_seq_lens_q"].tolist() == [0, 4, 5, 6, 7, 8, 12], "each token of padding is apart"


def test_mask_of_another_shape_is_refused():
    batch = _batch(padded=True)
    batch["attention_mask"] = batch["attention_mask"][:, None, None].expand(-1, 1, 6, 6)
    with pytest.raises(ValueError, match=r"attention_mask has the shape \[2, 1, 6, 6\], .*give a mask of padding"):
        prepare_batch(batch, CPU)


def test_masks_by_kind_of_layer_are_refused():
    """transformers takes them as a dict, which would be left out as no tensor."""
    batch = _batch(padded=True)
    batch["attention_mask"] = {"full_attention": batch["attention_mask"]}
    with pytest.raises(ValueError, match=r"attention_mask is a dict; give a tensor \[B, S\]"):
        prepare_batch(batch, CPU)


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
