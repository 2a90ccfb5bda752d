"""The split backward on a GPU, where backwards and recomputation run in autograd's own thread."""

import pytest
import torch

from tests.engine.backward.test_models import build, check


@pytest.mark.gpu(shows="the split backward's gradients, where autograd has a thread of its own")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_gradients(name, checkpointing):
    stage = build(name, dtype=torch.bfloat16, checkpointing=checkpointing).cuda()
    stage.ids = stage.ids.cuda()
    check(stage, use_hidden=False, exact=False)
