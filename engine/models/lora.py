"""Low-rank adapters through peft: the same for every split of the model."""

from __future__ import annotations

import contextlib

import peft
import torch
from peft import NoMatchingPeftModuleError
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weft.conf.schema import LoraConfig
from weft.engine.models.seeding import seeded
from weft.engine.models.skeleton import Placeholder, model_class, skeleton

ADAPTER = "default"
"""Name of the adapter in peft's models."""
NO_ADAPTERS = ("reformer",)
"""Types of models whose layers peft adapts, and whose adapters get no gradient."""
PREFIX = "base_model.model."
"""The prefix that peft adds to a parameter's name."""
ALL_LINEAR = "all-linear"
"""Name for every linear layer except the output embedding, as in peft. Experts and routers are not included."""


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> nn.Module:
    """Freeze a model and add adapters.

    Returns:
        peft's wrapper of the model, or the frozen model itself if none of its modules is a target.
    """
    model.requires_grad_(False)
    settings = peft_config(config, model)
    elsewhere = {name: module for name, module in model.named_modules() if isinstance(module, Placeholder)}
    targets = {name for name in elsewhere if check_target_module_exists(settings, name)}
    settings.exclude_modules = targets or None
    adapted: nn.Module = model
    with contextlib.suppress(NoMatchingPeftModuleError):
        adapted = peft.get_peft_model(model, settings)
    settings.exclude_modules = None
    for name in targets:
        _wrap_weights(elsewhere[name])
    for name, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer):
            with seeded(seed, name), torch.no_grad():
                layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
    return adapted


def _wrap_weights(placeholder: Placeholder) -> None:
    """Rename a placeholder's weights to the names that other stages have for weights below an adapter."""
    if placeholder._parameters:
        inner = Placeholder(placeholder)
        inner._parameters.update(placeholder._parameters)
        placeholder._parameters.clear()
        placeholder._modules["base_layer"] = inner


def require_targets(config: LoraConfig, cls: type[PreTrainedModel], hf_config: PreTrainedConfig) -> None:
    """Check that peft can adapt each of ``target_modules`` in the whole model. It ignores unknown names.

    Raises:
        ValueError: a target is not a module, peft does not support one, or the model cannot be built.
    """
    if not config.target_modules or config.target_modules == [ALL_LINEAR]:
        return
    whole = skeleton(cls, hf_config)
    matched = {
        target: {name: module for name, module in whole.named_modules() if f".{name}".endswith(f".{target}")}
        for target in config.target_modules
    }
    for target, modules in matched.items():
        for name, module in modules.items():
            if isinstance(module, nn.Linear) and not _is_plain(module):
                raise ValueError(
                    f"model.lora.target_modules={config.target_modules}: {target} stands for {name}, a "
                    f"{type(module).__name__}, which peft takes for a linear layer; leave it out"
                )
    missing = [target for target, modules in matched.items() if not modules]
    if missing:
        raise ValueError(
            f"model.lora.target_modules={config.target_modules}: {cls.__name__} has no module {', '.join(missing)}; "
            f"its matrices are {', '.join(_matrices(whole))}; {ALL_LINEAR} alone stands for all but the output's"
        )


def require_adapters(config: LoraConfig, cls: type[PreTrainedModel], hf_config: PreTrainedConfig) -> None:
    """Check that peft can adapt the whole model, by `require_targets` and by a trial without memory.

    Raises:
        ValueError: it cannot.
    """
    if hf_config.model_type in NO_ADAPTERS:
        raise ValueError(
            f"model.lora.enabled=true: the layers of {cls.__name__} compute gradients only if their input has one, and "
            "the output of a frozen embedding has none; train all weights, or choose another architecture"
        )
    require_targets(config, cls, hf_config)
    whole = skeleton(cls, hf_config)
    settings = peft_config(config, whole)
    try:
        peft.get_peft_model(whole, settings)
    except Exception as error:  # any: it is peft's own code
        raise ValueError(
            f"model.lora.target_modules={config.target_modules}: peft cannot adapt {cls.__name__} "
            f"({str(error).splitlines()[0]}); name other modules"
        ) from error


def _matrices(model: PreTrainedModel, *, output: bool = True) -> list[str]:
    """Return names of a model's linear layers that peft can adapt. ``output`` includes the output embedding.

    A name is the last part of the names of such layers, or a whole name if other modules have the same last part.
    """
    head = None if output else model.get_output_embeddings()
    names = dict(model.named_modules())
    matrices = [name for name, module in names.items() if _is_matrix(module) and module is not head]
    ends = {name.rpartition(".")[2] for name in matrices}
    others = {name.rpartition(".")[2] for name in names.keys() - set(matrices) if names[name] is not head}
    return sorted((ends - others) | {name for name in matrices if name.rpartition(".")[2] in others})


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, Conv1D) or (isinstance(module, nn.Linear) and _is_plain(module))


def _is_plain(module: nn.Linear) -> bool:
    """True if a linear layer returns its product with any input. Some routers and grouped layers do not."""
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        with torch.no_grad():
            output = module(
                torch.empty(2, 3, module.in_features, device=module.weight.device, dtype=module.weight.dtype)
            )
    except Exception:  # any: it is the model's own code
        return False
    return isinstance(output, Tensor) and output.shape == (2, 3, module.out_features)


def peft_config(config: LoraConfig, model: PreTrainedModel) -> peft.LoraConfig:
    """Convert the settings to peft's config.

    Raises:
        ValueError: no target modules are set, and peft has no default for the architecture.
    """
    model_type = model.config.model_type
    if config.target_modules == [ALL_LINEAR]:  # of the whole model, because a stage may lack some kinds of layers
        targets = _matrices(skeleton(model_class(model.config), model.config), output=False)
    else:
        targets = list(config.target_modules) or TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type)
    if not targets:
        raise ValueError(
            f"model.lora.target_modules=[]: peft knows no usual targets for model_type={model_type}; "
            "name the modules, for example model.lora.target_modules=[q_proj,v_proj]"
        )
    return peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
