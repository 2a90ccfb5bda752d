"""Rejection of architectures and settings that stages cannot reproduce, with the reason."""

from __future__ import annotations

from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

LEAKS_ACROSS_DOCUMENTS = frozenset(
    {
        "afmoe",
        "bamba",
        "bart",
        "bert",
        "bert-generation",
        "big_bird",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot",
        "blenderbot-small",
        "bloom",
        "camembert",
        "cpmant",
        "data2vec-text",
        "deepseek_v4",
        "electra",
        "ernie",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "gpt_oss",
        "granitemoehybrid",
        "inkling_text",
        "jamba",
        "kimi_linear",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "marian",
        "mbart",
        "megatron-bert",
        "minimax",
        "mpt",
        "mvp",
        "nemotron_h",
        "olmo_hybrid",
        "openai-gpt",
        "opt",
        "pegasus",
        "plbart",
        "prophetnet",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "recurrent_gemma",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "rwkv",
        "trocr",
        "xglm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xlstm",
        "xmod",
        "zamba2",
        "zaya",
    }
)
"""Model types whose forward in transformers 5.19 computes packed documents differently from documents alone.

Recurrent layers and convolutions run over whole rows, and many older models ignore position ids.
"""


def refuse_packing(model_type: str) -> None:
    """Check a list of architectures whose Hugging Face forward does not separate packed documents.

    ``self_check(..., packing=True)`` tests it for architectures that are not listed.

    Raises:
        ValueError: the architecture does not separate them.
    """
    if model_type in LEAKS_ACROSS_DOCUMENTS:
        raise ValueError(
            f"data.packing=true: with model_type={model_type} Hugging Face's forward lets packed documents depend on "
            "each other; set data.packing=false"
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
