"""Rejection of architectures and settings that stages cannot reproduce, with the reason."""

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
"""Model types whose forward in transformers 5.19 lets packed documents attend to the previous one."""


def refuse_packing(model_type: str) -> None:
    """Check a list of architectures whose Hugging Face forward does not separate packed documents.

    ``self_check(..., packing=True)`` tests it for architectures that are not listed.

    Raises:
        ValueError: the architecture does not separate them.
    """
    if model_type in LEAKS_ACROSS_DOCUMENTS:
        raise ValueError(
            f"data.packing=true: with model_type={model_type} Hugging Face's forward lets packed documents see each "
            "other; set data.packing=false"
        )


def refuse_partitioning(model: nn.Module | None = None) -> None:
    """Check that DeepSpeed's ZeRO-3 does not divide weights. It would divide the weights of every module made here.

    Raises:
        ValueError: `deepspeed.zero.Init` is active, transformers would enter it, or the model was made in it.
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
