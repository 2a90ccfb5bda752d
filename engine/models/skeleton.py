"""The skeleton of a model: modules and names, on the meta device."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the causal language model for a config.

    Raises:
        ValueError: neither transformers nor the model's own code has one.
    """
    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if found is not None:
        return found[0] if isinstance(found, tuple | list) else found
    if (text_only := _class_of_text_part(config)) is not None:
        return text_only
    reference = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if reference is None:
        raise ValueError(
            f"model: transformers has no causal language model for model_type={config.model_type}; "
            "choose a text-generation model"
        )
    return get_class_from_dynamic_module(reference, config.name_or_path)


def _class_of_text_part(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the causal language model's class for a text config that is a part of the config in transformers' list.

    Return None if there is no such class.
    """
    family = type(config).__module__.rpartition(".")[0]
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if family == f"transformers.models.{model_type_to_module_name(model_type)}" and isinstance(name, str):
            found = getattr(importlib.import_module(family), name)
            if found.config_class is type(config):
                return found
    return None


def causal_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text part of a config if the causal language model takes only that part, or else the config.

    `AutoModelForCausalLM` does the same.
    """
    text = config.sub_configs.get("text_config")
    return config.get_text_config() if text is not None and model_class(config).config_class is text else config


def skeleton(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return the whole model on the meta device. Raise ValueError if transformers cannot build the model."""
    try:
        with quiet(), torch.device("meta"):
            return cls(copy.deepcopy(config))
    except Exception as error:  # any, because this runs transformers' or the model's own code
        raise ValueError(
            f"model: transformers cannot build {cls.__name__} from this config "
            f"({type(error).__name__}: {' '.join(str(error).split())}); check model.overrides"
        ) from error


def config_skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the whole causal language model of a config on the meta device. See `skeleton`."""
    return skeleton(model_class(config), config)


LAYER_COUNTS = ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
"""Fields of Hugging Face configs with the number of decoder layers.

The first existing one is used. If a config has both of the last two, the last one counts attention blocks, of which a
layer may have several.
"""


def num_layers(config: PreTrainedConfig) -> int:
    """Return the number of decoder layers of a causal language model.

    Raises:
        ValueError: the config has no such field.
    """
    text = config.get_text_config()
    found = next((getattr(text, name) for name in LAYER_COUNTS if type(getattr(text, name, None)) is int), None)
    if found is None:
        raise ValueError(
            f"model: {type(config).__name__} has no number of decoder layers; "
            "choose another architecture, or run it whole with pipeline.stages=1"
        )
    return found


def decoder_layers(model: PreTrainedModel) -> str:
    """Return the path of the list of decoder layers, such as ``model.layers``.

    Raises:
        ValueError: the model has no such list.
    """
    count = num_layers(model.config)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    blocks = set(model._no_split_modules or ())
    named = [name for name in outermost if blocks & {type(layer).__name__ for layer in lists[name]}]
    if not outermost:
        raise ValueError(
            f"model: {type(model).__name__} has no list of {count} decoder layers to cut; "
            "choose another architecture, or run it whole with pipeline.stages=1"
        )
    return (named or outermost)[0]


def refuse_skipped_layers(config: PreTrainedConfig, name: str) -> None:
    """Check that a model runs all layers in each step. Raise ValueError if it does not."""
    if dropped := getattr(config.get_text_config(), "layerdrop", 0):
        raise ValueError(
            f"model: {name} skips layers at random (layerdrop={dropped}), for which other ranks wait; set layerdrop=0 "
            "(model.overrides)"
        )


def cuttable_layers(model: PreTrainedModel) -> str:
    """Return `decoder_layers` of a model that will be cut.

    Raises:
        ValueError: there is no list of layers, several lists have a part of each layer, or layers are skipped at random
            or share weights.
    """
    path = decoder_layers(model)
    parent = path.rpartition(".")[0]
    count = num_layers(model.config)
    beside = [
        name
        for name, module in model.get_submodule(parent).named_children()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    name, remedy = type(model).__name__, "choose another architecture, or run it whole with pipeline.stages=1"
    refuse_skipped_layers(model.config, name)
    if count > 1 and len(beside) > 1:
        raise ValueError(
            f"model: {name} has the parts of its layers in several lists, {', '.join(beside)}, so there is no layer to "
            f"cut behind; {remedy}"
        )
    for target, source in model.all_tied_weights_keys.items():
        inner = [key[len(path) + 1 :].partition(".")[0] for key in (target, source) if key.startswith(f"{path}.")]
        if len(set(inner)) > 1:
            raise ValueError(f"model: layers {' and '.join(inner)} of {name} share the weight {source}; {remedy}")
    return path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context in which transformers does not log or show progress, such as warnings about weights of other stages."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def hf_model(model: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model inside of peft's wrapper, or the model itself without one.

    Raises:
        ValueError: the model is not Hugging Face's.
    """
    whole = model if isinstance(model, PreTrainedModel) else getattr(model, "get_base_model", lambda: None)()
    if not isinstance(whole, PreTrainedModel):
        raise ValueError(
            f"model: {type(model).__name__} is no Hugging Face model; give a causal one, such as "
            "AutoModelForCausalLM.from_pretrained makes, or peft's around one"
        )
    return whole


def set_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast floating-point weights to ``dtype``, except those that transformers keeps in fp32."""
    plan = model._get_dtype_plan(dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not (kept and kept.search(name)):
            parameter.data = parameter.data.to(dtype)


class Placeholder(nn.Module):
    """Stand-in for a module, with its plain attributes, such as a layer's attention type, and with weights on the meta
    device.

    Some models iterate over all of their layers to initialise or rescale them. On the meta device this has no effect.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.training = original.training
        likeness = original._likeness[0] if isinstance(original, Placeholder) else without_memory(original)
        self._likeness: tuple[nn.Module] = (likeness,)  # a tuple, so that torch does not register it as a submodule
        for name, value in vars(original).items():
            if not name.startswith("_") and (value is None or isinstance(value, bool | int | float | str | Enum)):
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_likeness":
                raise
            return getattr(self._likeness[0], name)


def without_memory(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device, or the module itself if it is on the meta device already."""
    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return module
    memo: dict[int, Any] = {}
    for tensor in tensors:
        bare = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copied(module, memo)


def copied(module: nn.Module, others: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
    """Return a copy of a module.

    torch copies no tensor with a history, so a state that a forward has left, as in recurrent layers, is detached.

    Args:
        others: by the ``id`` of tensors, what the copy has in their place.
    """
    states = (value for each in module.modules() for value in vars(each).values() if isinstance(value, Tensor))
    memo = {id(state): state.detach().clone() for state in states if not state.is_leaf}
    return copy.deepcopy(module, memo | dict(others))
