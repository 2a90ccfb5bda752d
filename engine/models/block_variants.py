"""Variants of a new model's blocks, as config fields of the architectures in transformers that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.conf.schema import ModelConfig

Fields = Mapping[str, Mapping[str, Any]]
"""Config fields by model_type."""
PARALLEL_BLOCK: Fields = {
    "codegen": {},
    "cohere": {},
    "cohere2": {},
    "falcon": {"parallel_attn": True},
    "gpt_neox": {"use_parallel_residual": True},
    "gptj": {},
    "phi": {},
    "stablelm": {"use_parallel_residual": True},
}
"""Architectures that compute attention and MLP of a block from the same input (MegaScale section 3.1)."""
_EVERY_LAYER = {"use_sliding_window": True, "max_window_layers": 0}
SLIDING_WINDOW: Fields = {
    "cohere2": {},
    "exaone4": {},
    "gemma2": {},
    "gemma3_text": {},
    "ministral": {},
    "mistral": {},
    "olmo3": {},
    "phi3": {},
    "qwen2": _EVERY_LAYER,
    "qwen3": _EVERY_LAYER,
    "starcoder2": {},
}
"""Architectures with sliding-window attention, whose field `sliding_window` is the number of tokens."""


def variant_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config fields of a new model with the configured variants, or none without a variant.

    Raises:
        ValueError: the model is not new, the architecture lacks a variant, or an override sets one of the fields.
    """
    fields: dict[str, Any] = {}
    if config.parallel_block:
        fields |= _fields(config, "parallel_block", "true", PARALLEL_BLOCK)
    if config.sliding_window:
        fields |= _fields(config, "sliding_window", str(config.sliding_window), SLIDING_WINDOW)
        fields["sliding_window"] = config.sliding_window
    return fields


def _fields(config: ModelConfig, name: str, value: str, known: Fields) -> Mapping[str, Any]:
    setting = f"model.{name}={value}"
    if config.path:
        raise ValueError(
            f"{setting}: the blocks of {config.path} are as they were trained; leave it out, or train a new model with "
            "model.path=''"
        )
    if config.arch not in known:
        raise ValueError(
            f"{setting}: blocks of model.arch={config.arch} have no such variant in transformers; "
            f"set model.arch to one of {', '.join(known)}"
        )
    taken = {*known[config.arch], name} & config.overrides.keys()
    if taken:
        raise ValueError(
            f"{setting}: it sets model.overrides.{sorted(taken)[0]}, which is given, too; leave one of them out"
        )
    return known[config.arch]
