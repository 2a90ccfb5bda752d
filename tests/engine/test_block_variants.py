"""A new model with parallel blocks and windows is trained, exported, and loaded by plain transformers."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Cohere2ForCausalLM

from tests.engine.tiny import batches
from tests.engine.variants import WINDOW, train_and_export
from weft.tools.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_trained_model_computes_the_same_logits_in_plain_transformers(tmp_path):
    first, last = run_ranks(2, train_and_export, str(tmp_path), timeout_s=140)[0]
    assert last < first - 0.1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert type(model) is Cohere2ForCausalLM and model.config.sliding_window == WINDOW
    expected = load_file(tmp_path / "logits.safetensors")["logits"]
    with torch.no_grad():
        found = model.eval()(input_ids=next(batches(0, 1))["input_ids"]).logits
    torch.testing.assert_close(found, expected)
