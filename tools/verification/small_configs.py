"""Configurations that a small text-only model can be made of, where an architecture's default is not one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

DECODER = {"is_decoder": True}
"""Bidirectional unless told otherwise."""
GROUPED = {"head_dim": 128, "num_key_value_heads": 8}
EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
PER_KIND = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")}
DEPARTURES: Mapping[str, Mapping[str, Any]] = {
    "bert": DECODER,
    "bert-generation": DECODER,
    "big_bird": DECODER | {"attention_type": "original_full"},
    "camembert": DECODER,
    "data2vec-text": DECODER,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": EXPERTS,
    "electra": DECODER,
    "ernie": DECODER,
    "hunyuan_v1_dense": GROUPED,
    "hunyuan_v1_moe": GROUPED,
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "megatron-bert": DECODER,
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "rembert": DECODER,
    "roberta": DECODER,
    "roberta-prelayernorm": DECODER,
    "roc_bert": DECODER,
    "roformer": DECODER,
    "cohere_compass_text": {"rope_parameters": PER_KIND},
    "dbrx": {"attn_config": {"kv_n_heads": 2}},
    "mamba2": {"num_heads": 8, "head_dim": 32, "hidden_size": 128, "state_size": 16, "n_groups": 2},
    "openai-gpt": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "rwkv": {
        "hidden_size": 64,
        "attention_hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 96,
    },
    "reformer": DECODER,
    "xlm": {"causal": True},
    "xlstm": {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": 96},
    "xlm-roberta": DECODER,
    "xlm-roberta-xl": DECODER,
    "xmod": DECODER | {"default_language": "en_XX"},
}
"""Fields of the config by model_type."""


def small_config(model_type: str) -> PreTrainedConfig:
    """The default configuration of a type, or the nearest that can be built."""
    return AutoConfig.for_model(model_type, **DEPARTURES.get(model_type, {}))
