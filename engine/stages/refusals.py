"""Architectures and settings that stages cannot reproduce, and why."""

from __future__ import annotations

from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

LEAKS_ACROSS_DOCUMENTS = frozenset(
    {
        "afmoe",
        "bamba",
        "biogpt",
        "bloom",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "gpt_oss",
        "granitemoehybrid",
        "inkling_text",
        "jamba",
        "mamba",
        "mamba2",
        "minimax",
        "mpt",
        "nemotron_h",
        "olmo_hybrid",
        "opt",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "xglm",
        "zamba2",
    }
)
"""Types whose Hugging Face forward lets a packed document see the one before it, in transformers 5.19."""


def refuse_packing(model_type: str) -> None:
    """Refuse packed sequences where Hugging Face's forward does not keep documents apart.

    ``self_check(..., packing=True)`` tries it out, for architectures that are not known here.

    Raises:
        ValueError: the architecture is one of those.
    """
    if model_type in LEAKS_ACROSS_DOCUMENTS:
        raise ValueError(
            f"data.packing=true: with model_type={model_type} Hugging Face's forward lets packed documents see each "
            "other; set data.packing=false"
        )


def refuse_partitioning(model: nn.Module | None = None) -> None:
    """Refuse weights that DeepSpeed's ZeRO-3 cuts up, as it would those of every module that is made here.

    Raises:
        ValueError: `deepspeed.zero.Init` is active, or transformers would enter it, or the model was made inside.
    """
    from deepspeed.runtime.zero import partition_parameters

    if partition_parameters.top_level_context is not None:
        where = "inside deepspeed.zero.Init"
    elif is_deepspeed_zero3_enabled():
        where = "under zero_optimization.stage=3 in a transformers HfDeepSpeedConfig"
    elif model is not None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        where = "with a model that was made inside deepspeed.zero.Init"
    else:
        return
    raise ValueError(
        f"model: weft.initialize {where}: it would cut up the weights before stages can hold them; leave that out: "
        "every rank loads its own stages only, and weft.zero.stage=3 shards them"
    )
