"""The split backward through Hugging Face stages: gradients of the whole model, any order of W."""

import copy

import pytest
import torch

from tests.engine.backward.test_models import build
from weft.conf.schema import SplitKind
from weft.engine.backward import SplitBackward
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers


def batch_of(ids):
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}


def train_in_stages(stages, batches, num_items):
    """Two micro-batches through all stages: every I first, then every W, last stage first."""
    splits = [SplitBackward(stage) for stage in stages]
    waiting = []
    for batch in batches:
        hidden, saved = None, []
        for stage, split in zip(stages, splits, strict=True):
            leaf = None if hidden is None else hidden.detach().requires_grad_()
            hidden, one = split.forward(lambda s=stage, h=leaf, b=batch: s(h, b, num_items), leaf)
            saved.append((split, one))
        gradient = torch.ones_like(hidden)
        for split, one in reversed(saved):
            gradient = split.input_backward(one, gradient)
            waiting.append((split, one))
    for split, one in waiting:
        split.weight_backward(one)
    return splits


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "gemma2", "mixtral", "qwen3_moe"])
def test_gradients_of_the_whole_model(name, checkpointing):
    model = build(name, checkpointing=checkpointing).model
    ids = torch.randint(1, 64, (2, 2, 12))
    batches = [batch_of(part) for part in ids]
    num_items = torch.tensor(44.0)
    whole = copy.deepcopy(model)
    for batch in batches:
        whole(**batch, num_items_in_batch=num_items, use_cache=False).loss.backward()
    want = {n: p.grad for n, p in whole.named_parameters()}

    stages = stages_from_model(model, split_layers(model.config, 2, SplitKind.even), [0, 1])
    splits = train_in_stages(stages, batches, num_items)
    got = {}
    for stage in stages:
        for parameter_name, parameter in stage.named_global_parameters():
            got.setdefault(parameter_name, parameter)
    assert got.keys() == want.keys()
    for parameter_name, parameter in got.items():
        torch.testing.assert_close(
            parameter.grad, want[parameter_name], rtol=1e-4, atol=1e-6, msg=lambda m, n=parameter_name: f"{n}: {m}"
        )
    assert all("norm" in n or "ln_" in n for split in splits for n in split.unsplit)
