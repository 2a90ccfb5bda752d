"""Configurations of small text-only models, if an architecture's default is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

DECODER = {"is_decoder": True}
"""Makes architectures causal that are bidirectional by default."""
GROUPED = {"head_dim": 128, "num_key_value_heads": 8}
EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
PER_KIND = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 96}
GEMMA_4 = TINY | {
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
"""Embeddings for every layer."""
GEMMA_3N = TINY | {
    "intermediate_size": [64] * 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "activation_sparsity_pattern": [0.0] * 6,
    "laurel_rank": 8,
}
QWEN_4 = TINY | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 1,
}
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
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10_000.0},
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
    },
    "gemma3n": {"text_config": GEMMA_3N | PER_LAYER},
    "gemma3n_text": GEMMA_3N | PER_LAYER,
    "gemma4": {"text_config": GEMMA_4 | PER_LAYER},
    "gemma4_text": GEMMA_4 | PER_LAYER,
    "gemma4_unified": {"text_config": GEMMA_4},
    "gemma4_unified_text": GEMMA_4,
    "kimi_linear": TINY
    | {
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "longcat_flash": {
        "hidden_size": 64,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 16,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 96,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "n_routed_experts": 8,
        "zero_expert_num": 4,
        "moe_topk": 2,
    },
    "phi4_multimodal": TINY
    | {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 4},
    },
    "qwen4_exp": {"text_config": QWEN_4},
    "qwen4_exp_text": QWEN_4,
    "zamba": TINY
    | {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"] * 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "zamba2": TINY
    | {
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"] * 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 16,
        "adapter_rank": 8,
        "use_mamba_kernels": False,
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "hidden_size": 128, "state_size": 16, "n_groups": 2},
    "openai-gpt": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "rwkv": {
        "hidden_size": 64,
        "attention_hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "rescale_every": 1,
        "vocab_size": 96,
    },
    "reformer": DECODER | {"axial_pos_embds": False, "vocab_size": 96},
    "xlm": {"causal": True},
    "xlstm": {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": 96},
    "xlm-roberta": DECODER,
    "xlm-roberta-xl": DECODER,
    "xmod": DECODER | {"default_language": "en_XX"},
}
"""Fields of the config by model_type."""


def small_config(model_type: str) -> PreTrainedConfig:
    """Return the default configuration of a type, or the nearest one from which a model can be built."""
    return AutoConfig.for_model(model_type, **DEPARTURES.get(model_type, {}))
