"""Loading of virtual stages from a folder, a hub name or a configuration, without the whole model in memory."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from weft.conf.schema import Attention, ModelConfig
from weft.engine.models.batch import counts_from_padding
from weft.engine.models.block_variants import variant_fields
from weft.engine.models.lora import PREFIX, add_adapters, require_adapters, require_targets
from weft.engine.models.quantization import BaseQuantization, base_quantization, settle_quantized
from weft.engine.models.seeding import load, new_model
from weft.engine.models.skeleton import causal_config, config_skeleton, cuttable_layers, model_class, num_layers
from weft.engine.parallel.axis import AxisGroups
from weft.engine.stages.cutting.from_model import named_parts, share_tied
from weft.engine.stages.cutting.outline import Outline, outline_of
from weft.engine.stages.cutting.port import Port
from weft.engine.stages.cutting.prune import open_port, prune
from weft.engine.stages.cutting.split import StageSplit
from weft.engine.stages.cutting.stage import Stage, global_names
from weft.engine.stages.files.config_ranges import ImpossibleNumber, require_possible
from weft.engine.stages.files.folder import (
    is_local,
    require_whole_folder,
    source_of,
    tensor_types,
    weight_types,
    weights_folder,
)
from weft.engine.stages.files.shards import base_type, exact_type, settle_types

NO_FLOATS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64"}
"""Types of safetensors whose numbers are no weights."""


def load_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the Hugging Face config of a loaded or new model.

    Raises:
        ValueError: the folder cannot be read, or the architecture or an override is unknown.
    """
    overrides = {**variant_fields(config), **config.overrides}
    try:
        require_possible(overrides)
    except ImpossibleNumber as error:
        raise ValueError(f"model.overrides.{error}; correct it") from error
    if config.path:
        hf_config = _read_config(config)
        for name, value in overrides.items():
            _require_field(name, hf_config)
            setattr(hf_config, name, value)
    else:
        hf_config = _new_config(config.arch, overrides)
    quantization_of(config)  # raises
    hf_config = causal_config(hf_config)
    _set_attention(hf_config, config.attn_implementation)
    return hf_config


def _set_attention(hf_config: PreTrainedConfig, attention: Attention) -> None:
    cls = model_class(hf_config)
    supported = {
        Attention.sdpa: getattr(cls, "_supports_sdpa", False),
        Attention.flex_attention: getattr(cls, "_supports_flex_attn", False),
        Attention.varlen: getattr(cls, "_supports_attention_backend", False),
        **{kind: getattr(cls, "_supports_flash_attn", False) for kind in Attention if kind.is_flash},
    }
    if not supported.get(attention, True):
        others = [kind.value for kind in (Attention.sdpa, Attention.flash_attention_2) if supported[kind]] + ["eager"]
        raise ValueError(
            f"model.attn_implementation={attention.value}: {cls.__name__} does not support it; "
            f"set it to {' or '.join(others)}"
        )
    hf_config._attn_implementation = attention.value


def quantization_of(config: ModelConfig) -> BaseQuantization | None:
    """Return how the linear layers of the base model are quantised, or None if they are not.

    Raises:
        ValueError: see `base_quantization`.
    """
    return base_quantization(config.lora, source_of(config.path))


def _read_config(config: ModelConfig) -> PreTrainedConfig:
    if is_local(config.path):
        require_whole_folder(Path(config.path).expanduser())
    try:
        require_possible(PreTrainedConfig.get_config_dict(source_of(config.path))[0])
        hf_config = AutoConfig.from_pretrained(source_of(config.path), trust_remote_code=config.trust_remote_code)
    except Exception as error:  # any: configs validate with errors of several libraries
        reason, remedy = _one_line(error), "correct its config.json, or give the folder of a saved model"
        if not (is_local(config.path) or isinstance(error, ImpossibleNumber)):
            reason = f"no such folder, and no such model on the hub or in its cache ({reason})"
        raise ValueError(f"model.path={config.path}: {reason}; {remedy}") from error
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config  # the stages' own: see `BaseQuantization.loading`
    return hf_config


def _new_config(arch: str, overrides: dict) -> PreTrainedConfig:
    try:
        plain = AutoConfig.for_model(arch)
    except ValueError as error:
        raise ValueError(
            f"model.arch={arch}: not a model_type of transformers; for example llama, qwen3, gpt2, mixtral"
        ) from error
    for name in overrides:
        _require_field(name, plain)
    try:
        return AutoConfig.for_model(arch, **overrides)
    except Exception as error:  # any: configs validate with errors of several libraries
        raise ValueError(f"model.overrides: {type(plain).__name__} refuses them ({_one_line(error)})") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _require_field(name: str, hf_config: PreTrainedConfig) -> None:
    """Reject misspelt overrides.

    Configs accept any name, and only the model's code uses some fields, so its source is searched as well.
    """
    known = {*dir(hf_config), *hf_config.attribute_map}
    if name not in known and name not in inspect.getsource(sys.modules[model_class(hf_config).__module__]):
        near = difflib.get_close_matches(name, hf_config.to_dict(), n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see its documentation"
        raise ValueError(f"model.overrides.{name}: {type(hf_config).__name__} has no such field{hint}")


def check_model_fits(config: ModelConfig, stages: int, tokens: int, *, tensor: int = 1, expert: int = 1) -> None:
    """Check without weights that a model can be read and supports the run's settings, such as target modules.

    Args:
        stages: number of virtual stages, each with at least one layer.
        tokens: sequence length. The model needs as many positions.
        tensor, expert: sizes of the groups that share layers.

    Raises:
        ValueError: it cannot be read or does not support them.
    """
    hf_config = load_hf_config(config)
    check_padding(config, hf_config)
    positions = getattr(hf_config, "max_position_embeddings", None)
    if isinstance(positions, int) and counts_from_padding(model_class(hf_config).__module__) is not None:
        positions -= (hf_config.pad_token_id or 0) + 1
    if isinstance(positions, int) and 0 < positions < tokens:
        raise ValueError(
            f"data.sequence_length={tokens}: {config.path or config.arch} is made for {positions} positions; shorten "
            f"it, or set model.overrides.max_position_embeddings={tokens} if the model can go beyond"
        )
    if stages > 1 and stages > (layers := num_layers(hf_config)):
        raise ValueError(
            f"pipeline.stages: {stages} virtual stages, but {config.path or config.arch} has {layers} layers and every "
            "stage needs one; use fewer stages"
        )
    if config.lora.enabled:
        require_adapters(config.lora, model_class(hf_config), hf_config)
    quantized, model = quantization_of(config), None
    if quantized is not None:
        quantized.require_whole_layers(tensor=tensor, expert=expert)
        if quantized.is_stored:
            return  # packed weights have other names and shapes than the model's
    if config.path and is_local(config.path) and weight_types(weights_folder(config.path)):
        cls = model_class(hf_config)
        try:
            model, report = load(
                cls,
                source_of(config.path),
                hf_config,
                dtype=torch.float32,
                seed=0,
                prune=lambda model: None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                device_map="meta",  # reads only headers
            )
        except Exception as error:  # any: negative sizes, unknown activations, odd settings, damaged headers
            remedy = "correct config.json or generation_config.json, or copy or download the folder again"
            raise ValueError(f"model.path={config.path}: not read ({_one_line(error)}); {remedy}") from error
        trained = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
        kinds = tensor_types(weights_folder(config.path))
        odd = [f"{name} has the type {kind}" for name, kind in kinds.items() if name in trained and kind in NO_FLOATS]
        _require_fitting(config, cls, {**report, "error_msgs": odd})
    if not config.path:
        model = config_skeleton(hf_config)
    if model is not None and stages > 1:
        cuttable_layers(model)


def check_padding(config: ModelConfig, hf_config: PreTrainedConfig) -> None:
    """Check that the embedding has a vector for the padding token, which models require.

    Raises:
        ValueError: the token's id is not below the size of the vocabulary.
    """
    text = hf_config.get_text_config()
    pad, rows = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and pad >= rows:
        setting = f"model.path={config.path}" if config.path else f"model.arch={config.arch}"
        raise ValueError(
            f"{setting}: pad_token_id={pad}, and the model has {rows} rows of embeddings; "
            f"set model.overrides.pad_token_id to a token below {rows}"
        )


def build_model(config: ModelConfig, *, dtype: torch.dtype, seed: int) -> nn.Module:
    """Make or load the whole model, with the same weights that `load_stages` gives all stages together."""
    hf_config = load_hf_config(config)
    cls = model_class(hf_config)
    return _with_adapters(_load_part(config, cls, hf_config, lambda model: None, dtype=dtype, seed=seed), config, seed)


def load_stages(
    config: ModelConfig,
    split: StageSplit,
    stages: Sequence[int],
    *,
    dtype: torch.dtype,
    seed: int,
    axes: AxisGroups | None = None,
    exact: bool = False,
) -> list[Stage]:
    """Load or make some virtual stages of a model, without memory for other stages' weights.

    New weights depend only on the seed and their names, so they are the same for every split.
    Tied weights of two of the stages are one parameter. A single stage is the whole model, uncut.

    Args:
        split: layers of every stage of the whole model.
        stages: numbers of the virtual stages wanted.
        axes: groups that divide each layer. None does not divide.
        exact: load trained weights in their original precision, for master weights.

    Raises:
        ValueError: the model cannot be read or cannot be cut faithfully.
    """
    hf_config, axes = load_hf_config(config), axes or AxisGroups()
    if exact:
        loaded = exact_type(config, dtype)
        made = load_stages(config, split, stages, dtype=loaded, seed=seed, axes=axes)
        settle_types(made, base_type(config, hf_config), dtype)
        return made
    cls = model_class(hf_config)
    if config.lora.enabled:
        require_targets(config.lora, cls, hf_config)
    if split.num_stages > 1:
        return new_stages(cls, hf_config, split, stages, dtype=dtype, seed=seed, source=config, axes=axes)
    model = _load_part(config, cls, hf_config, lambda model: None, dtype=dtype, seed=seed, axes=axes)
    dressed = _with_adapters(model, config, seed)
    cuts = named_parts(model, axes, PREFIX if config.lora.enabled else "")
    return [Stage(dressed, index=0, num_stages=1, port=Port(), axes=axes, cuts=cuts)]


def new_stages(
    cls: type[PreTrainedModel],
    hf_config: PreTrainedConfig,
    split: StageSplit,
    stages: Sequence[int],
    *,
    dtype: torch.dtype,
    seed: int,
    source: ModelConfig | None = None,
    axes: AxisGroups | None = None,
) -> list[Stage]:
    """Load or make stages as `load_stages` does, from a class and its config. Without ``source`` the model is new."""
    outline = outline_of(cls, hf_config)
    assert split.num_layers == outline.num_layers
    given = source or ModelConfig()
    groups = axes or AxisGroups()
    made = [
        _load_stage(given, cls, hf_config, outline, split, index, dtype=dtype, seed=seed, axes=groups)
        for index in stages
    ]
    share_tied(made)
    return made


def _load_stage(
    config: ModelConfig,
    cls: type[PreTrainedModel],
    hf_config: PreTrainedConfig,
    outline: Outline,
    split: StageSplit,
    index: int,
    *,
    dtype: torch.dtype,
    seed: int,
    axes: AxisGroups,
) -> Stage:
    window, tied = split.layers[index], set[str]()
    model = _load_part(
        config,
        cls,
        hf_config,
        lambda model: tied.update(prune(model, outline, window)),
        dtype=dtype,
        seed=seed,
        axes=axes,
    )
    _require_tied(model, tied, config, window.stop == outline.num_layers)
    shared = {parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name in tied}
    port = open_port(model, outline, window, frozenset(tied))
    dressed = _with_adapters(model, config, seed)
    cuts = named_parts(model, axes, PREFIX if config.lora.enabled else "")
    inner = PREFIX if dressed is not model else ""
    return Stage(
        dressed,
        index=index,
        num_stages=split.num_stages,
        port=port,
        tied=frozenset(name for name, parameter in global_names(dressed) if parameter in shared),
        prefix=PREFIX if config.lora.enabled and not inner else "",
        axes=axes,
        cuts=cuts,
    )


def _load_part(
    config: ModelConfig,
    cls: type[PreTrainedModel],
    hf_config: PreTrainedConfig,
    prune: Callable[[PreTrainedModel], None],
    *,
    dtype: torch.dtype,
    seed: int,
    axes: AxisGroups | None = None,
) -> PreTrainedModel:
    if not config.path:
        return new_model(cls, hf_config, dtype=dtype, seed=seed, prune=prune)
    quantized, options = quantization_of(config), dict[str, Any]()
    if quantized is not None:
        hf_config, options = quantized.loading(cls, hf_config, dtype)
    try:
        model, report = load(
            cls,
            source_of(config.path),
            hf_config,
            dtype=dtype,
            seed=seed,
            prune=prune,
            axes=axes,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as error:  # any, because readers of several file formats raise different errors
        reason = _one_line(error)
        raise ValueError(
            f"model.path={config.path}: its weights cannot be read ({type(error).__name__}: {reason}); "
            "copy or download the folder again"
        ) from error
    _require_fitting(config, cls, report)
    if quantized is not None:
        settle_quantized(model)
    return model.train()


def _require_fitting(config: ModelConfig, cls: type[PreTrainedModel], report: Mapping[str, Any]) -> None:
    """Check transformers' loading report: the folder must have every weight of the model, in its shape."""
    missing = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    misfits = [f"{name} has shape {list(has)}, not {list(wants)}" for name, has, wants in report["mismatched_keys"]]
    if found := misfits + missing + sorted(map(str, report.get("error_msgs") or ())):
        raise ValueError(
            f"model.path={config.path}: {'; '.join(found[:4])}"
            f"{f'; and {len(found) - 4} more' if len(found) > 4 else ''}; so its weights are not those of a whole "
            f"{cls.__name__} of its config.json: copy or download it again, and check model.overrides"
        )


def _require_tied(model: PreTrainedModel, tied: set[str], config: ModelConfig, is_last: bool) -> None:
    """Check that weights are still tied, because transformers silently unties weights that differ in a checkpoint."""
    if is_last and tied - set(model.all_tied_weights_keys.values()):
        raise ValueError(
            f"model.path={config.path}: its config ties the head to the embedding, but its weights differ; "
            "set model.overrides.tie_word_embeddings=false"
        )


def _with_adapters(model: PreTrainedModel, config: ModelConfig, seed: int) -> nn.Module:
    return add_adapters(model, config.lora, seed=seed) if config.lora.enabled else model
