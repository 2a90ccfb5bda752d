"""The engine on one GPU: stages, split backward, precisions, attention kernels and CUDA timing."""

import importlib.util
import itertools
import warnings

import pytest
import torch

from tests.engine.tiny import batches, reference_losses, tiny_config, weft_losses
from weft.conf.schema import Attention
from weft.engine.initialize import initialize

pytestmark = pytest.mark.usefixtures("one_rank")

CASES = {
    "fp32": ({}, "sdpa", 1e-4),
    "bf16": ({"precision": "bf16"}, "sdpa", 1e-2),
    "fp16": ({"precision": "fp16"}, "sdpa", 1e-2),
    "bf16, ZeRO-1": ({"precision": "bf16", "zero": 1}, "eager", 1e-2),
    "two chunks, a hop on the device": ({"schedule": "interleaved"}, "sdpa", 1e-4),
    "split backward": ({"schedule": "auto"}, "sdpa", 1e-4),
    "LoRA, bf16": ({"precision": "bf16", "lora": True}, "sdpa", 1e-2),
    "varlen_attn": ({"precision": "bf16"}, "varlen", 1e-2),
    "FlashAttention": ({"precision": "bf16"}, "flash_attention_2", 1e-2),
}


@pytest.mark.gpu(shows="losses of one GPU's engine equal Hugging Face's, in every precision and attention kernel")
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_hugging_face_on_one_gpu(case):
    keywords, attention, tolerance = CASES[case]
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    config = tiny_config(stages=1, **keywords)
    config.model.attn_implementation = Attention[attention]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert weft_losses(config, 8) == pytest.approx(reference_losses(config, 1, 8, device), rel=tolerance)


@pytest.mark.gpu(shows="no step makes the host wait for the device, so that it may run ahead")
def test_the_host_runs_ahead():
    engine, *_ = initialize(config=tiny_config("auto", stages=1))
    engine.set_dataiterator(batches(0, 1))
    engine.train_batch()  # compiles, allocates and connects
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine.train_batch()
    torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in found if "synchronizing" in str(w.message)]
    engine.destroy()
    assert not waits


@pytest.mark.gpu(shows="a step without labels has a loss of zero, and the step after it says so")
def test_a_step_without_labels():
    engine, *_ = initialize(config=tiny_config(stages=1))
    empty = {name: torch.full((2, 12), fill) for name, fill in (("input_ids", 1), ("labels", -100))}
    engine.set_dataiterator(itertools.repeat(empty))
    assert float(engine.train_batch()) == 0.0
    with pytest.raises(ValueError, match="no token of this step carries a label"):
        engine.train_batch()
    engine.destroy()
