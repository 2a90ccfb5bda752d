"""The engine on one GPU: stages, split backward, precisions, attention kernels and CUDA timing."""

import importlib.util

import pytest
import torch

from tests.engine.tiny import reference_losses, tiny_config, weft_losses
from weft.conf.schema import Attention

CASES = {
    "fp32": ({}, "sdpa", 1e-4),
    "bf16": ({"precision": "bf16"}, "sdpa", 1e-2),
    "fp16": ({"precision": "fp16"}, "sdpa", 1e-2),
    "bf16, ZeRO-1": ({"precision": "bf16", "zero": 1}, "eager", 1e-2),
    "two chunks, a hop on the device": ({"schedule": "interleaved"}, "sdpa", 1e-4),
    "split backward": ({"schedule": "auto"}, "sdpa", 1e-4),
    "LoRA, bf16": ({"precision": "bf16", "lora": True}, "sdpa", 1e-2),
    "FlashAttention": ({"precision": "bf16"}, "flash_attention_2", 1e-2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_hugging_face_on_one_gpu(case):
    keywords, attention, tolerance = CASES[case]
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    config = tiny_config(stages=1, **keywords)
    config.model.attn_implementation = Attention[attention]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert weft_losses(config, 8) == pytest.approx(reference_losses(config, 1, 8, device), rel=tolerance)
