"""A small model of the same architecture, with the same flags and kinds of layers."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.engine.models.seeding import new_model
from weft.engine.models.sizes import EXPERT_COUNTS, chosen_experts
from weft.engine.models.skeleton import LAYER_COUNTS, decoder_layers, num_layers, skeleton
from weft.engine.models.varlen import VARLEN

VOCABULARY = 96
WIDTHS = re.compile("intermediate_size|n_inner|ffn_dim|ffn_hidden_size|d_ff")
"""Fields with the width of a feed-forward block. Many configs have several of them."""
HEADS = re.compile("head_dim$|_per_layer_input$")
"""Fields with the size of a head, or of a per-layer input."""
PROPORTIONAL = ("mamba_n_heads", "mamba_d_ssm", "n_mamba_heads")
"""Fields that are proportional to the hidden size."""
LAST_LAYERS = ("num_kv_shared_layers",)
"""Fields that count layers from the last one backwards."""
MAX_PARAMETERS = 100_000_000
"""Largest number of weights of a small copy, so that it runs quickly."""


def shrunken_model(cls: type[PreTrainedModel], config: PreTrainedConfig, *, min_layers: int) -> PreTrainedModel:
    """Return a small model with random weights, in fp32 on the CPU, in evaluation mode, without dropout.

    It has as many of the architecture's first layers as include every kind. Dimensions are as small as Hugging Face's
    own forward supports.

    Raises:
        ValueError: Hugging Face's forward does not run on any of the small copies.
    """
    count = _layers_of_every_kind(skeleton(cls, config), min_layers)
    error: Exception | None = None
    for steps in LADDER:
        small = _first_layers(config, count)
        for step in steps:
            step(small)
        try:
            _require_small(skeleton(cls, small))
            model = new_model(cls, small, dtype=torch.float32, seed=0).eval()
            with torch.no_grad():
                trial = copy.deepcopy(model)  # a run changes some models, such as weights that are rescaled
                trial(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)
        except Exception as failure:  # any: it is Hugging Face's or the model's own code
            error = error or failure
        else:
            return model
    assert error is not None
    reason = " ".join(str(error).split())
    raise ValueError(
        f"model: {cls.__name__} cannot be tried on a small copy ({type(error).__name__}: {reason}); "
        "check model.overrides, or choose another architecture"
    ) from error


def _require_small(model: PreTrainedModel) -> None:
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"it has {count:,} weights")


def _layers_of_every_kind(model: PreTrainedModel, at_least: int) -> int:
    """Return how many of the first layers include every kind of layer, but at least ``at_least``."""
    layers = model.get_submodule(decoder_layers(model))
    assert isinstance(layers, nn.ModuleList)
    traits = [_traits(layer) for layer in layers]
    keys = set().union(*traits)
    numbers = {key for key in keys if all(found.get(key, index) == index for index, found in enumerate(traits))}
    kinds = [{key: value for key, value in found.items() if key not in numbers} for found in traits]
    last_new = max(kinds.index(kind) for kind in kinds)
    return min(len(kinds), max(at_least, last_new + 1))


def _traits(layer: nn.Module) -> dict[tuple[str, ...], Any]:
    """Return what distinguishes kinds of layers: the classes, parameter shapes and plain attributes of their
    modules.
    """
    found: dict[tuple[str, ...], Any] = {}
    for path, module in layer.named_modules():
        found[path, "class"] = type(module).__qualname__
        for name, parameter in module.named_parameters(recurse=False):
            found[path, name] = parameter.shape
        for name, value in vars(module).items():
            if isinstance(value, bool | int | str):
                found[path, name] = value
    return found


def _first_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    whole = num_layers(config)
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(text, name, type(value)(value[:count]))
    for name in LAYER_COUNTS:
        value = getattr(text, name, None)
        if type(value) is int and value and value % whole == 0:
            with contextlib.suppress(NotImplementedError):  # some configs derive it, and do not allow setting it
                setattr(text, name, value // whole * count)
    for name in LAST_LAYERS:
        if value := getattr(text, name, None):
            setattr(text, name, max(0, value - (whole - count)))
    for name, value in list(vars(text).items()):
        if isinstance(value, float) and re.search("drop|jitter", name):
            setattr(text, name, 0.0)
    if text._attn_implementation not in (None, "eager", "sdpa", VARLEN):
        small._attn_implementation = "sdpa"
    return small


def _narrow(config: PreTrainedConfig) -> None:
    """Reduce attention to four heads of the same size, grouped if they were grouped."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    if heads <= 4:
        return
    text.hidden_size = min(text.hidden_size, 256) if text.hidden_size % heads else text.hidden_size // heads * 4
    text.num_attention_heads = 4
    groups = getattr(text, "num_key_value_heads", None)
    if groups is not None:
        text.num_key_value_heads = 4 if groups == heads else min(groups, 2)
    for name in PROPORTIONAL:
        if value := getattr(text, name, None):
            setattr(text, name, max(1, value * 4 // heads))


def _few_experts(config: PreTrainedConfig) -> None:
    text = config.get_text_config()
    chosen, experts = chosen_experts(text)
    for name in EXPERT_COUNTS:
        if experts and getattr(text, name, None) == experts:
            setattr(text, name, min(experts, max(4, 2 * chosen)))


def _thin(config: PreTrainedConfig) -> None:
    """Narrow the feed-forward blocks."""
    _set_integers(config.get_text_config(), WIDTHS, 64)


def _few_words(config: PreTrainedConfig) -> None:
    text = config.get_text_config()
    _set_integers(text, re.compile("vocab_size"), VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)


def _dull_senses(config: PreTrainedConfig) -> None:
    """Reduce each part of the model that does not read text to one layer."""
    for name in config.sub_configs:
        part = getattr(config, name)
        if isinstance(part, PreTrainedConfig) and part is not config.get_text_config():
            _set_integers(part, re.compile("num_hidden_layers|^depth$"), 1)


def _short_heads(config: PreTrainedConfig) -> None:
    """Reduce the head size where the config sets it separately, also for single layers."""
    text = config.get_text_config()
    _set_integers(text, HEADS, 32)
    layers = getattr(text, "per_layer_config", None) or {}
    for own in layers.values() if isinstance(layers, dict) else ():
        own.update({name: min(value, 64) for name, value in own.items() if HEADS.search(name) and type(value) is int})


def _set_integers(config: PreTrainedConfig, names: re.Pattern[str], most: int) -> None:
    for name, value in list(vars(config).items()):
        if not names.search(name):
            continue
        if type(value) is int:
            setattr(config, name, min(value, most))
        elif isinstance(value, list) and all(type(entry) is int for entry in value):
            setattr(config, name, [min(entry, most) for entry in value])


LADDER = (
    (_dull_senses, _narrow, _few_experts, _thin, _few_words),
    (_dull_senses, _few_experts, _thin, _few_words),
    (_dull_senses, _few_words),
    (),
    (_dull_senses, _narrow, _short_heads, _few_experts, _thin, _few_words),
)
"""Combinations of reductions, in the order in which they are tried.

The last one is for models that are still too large.
"""
