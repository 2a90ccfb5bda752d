"""Tiny models with random weights, one for each of several architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.shapes import sizes
from weft.conf.schema import ModelConfig

VOCABULARY = 96
COMMON = sizes(hidden=32, inner=48, layers=4, heads=4, groups=2, words=VOCABULARY) | {
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 8},
    "mistral": COMMON | {"sliding_window": 4},
    "gemma2": COMMON | {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": COMMON | {"head_dim": 8, "sliding_window": 4, "num_hidden_layers": 7},
    "gemma4_text": COMMON
    | {
        "head_dim": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "sliding_window": 4,
        "per_layer_config": {},
    },
    "phi3": COMMON,
    "gpt2": GPT2,
    "mixtral": COMMON | {"num_local_experts": 4},
    "qwen3_moe": COMMON | MIXTURE | {"head_dim": 8},
}
"""Fields of the Hugging Face config, by model_type. Windows are shorter than sequences, and
Gemma3 has one layer of full attention among those with a window. Layers of Gemma4 share keys and values."""


def tiny_model(arch: str = "llama", **overrides: Any) -> ModelConfig:
    """Return the configuration of a tiny model.

    Raises:
        ValueError: there is no tiny model of that architecture.
    """
    if arch not in TINY:
        raise ValueError(f"{arch}: no tiny model of this architecture; one of {', '.join(TINY)}")
    return ModelConfig(arch=arch, overrides={**TINY[arch], **overrides})
