"""Initialisation of weights that depends only on the seed and a module's name, not on other modules."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from weft.engine.models.skeleton import Placeholder, quiet, skeleton
from weft.engine.models.slices import reading_parts
from weft.engine.parallel.axis import AxisGroups

MAX_CONSTRUCTED = 200_000_000
"""Largest number of weights for which every rank may construct a whole model."""


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Context in which the CPU's random numbers depend only on ``seed`` and ``name``, and which restores its state."""
    with restored_generators(None):
        seed_generators(seed, name, None)
        yield


def restored_generators(device: torch.device | None) -> contextlib.AbstractContextManager[None]:
    """Return a context after which the generators of the CPU and a GPU ``device`` have their states of before."""
    return torch.random.fork_rng(devices=_gpus(device))


def seed_generators(seed: int, name: str, device: torch.device | None) -> None:
    """Seed the generators of the CPU and a GPU ``device`` by ``seed`` and ``name``."""
    number = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little") >> 1
    for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in _gpus(device))):
        generator.manual_seed(number)


def _gpus(device: torch.device | None) -> list[int]:
    return [device.index] if device is not None and device.type == "cuda" else []


def new_model(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    prune: Callable[[PreTrainedModel], Any] = lambda model: None,
) -> PreTrainedModel:
    """Return a model in training mode with new weights, initialised by Hugging Face's rules.

    Numbers are drawn in fp32 for one module at a time. So a pruned model has the same weights as the whole model. A
    bf16 model has the rounded weights of the fp32 model.

    Args:
        prune: called on the model before memory is allocated.

    Raises:
        ValueError: the rules do not cover all weights, and the model is too large to take them from its constructor.
    """
    model = load(cls, None, config, dtype=dtype, seed=seed, prune=prune, state_dict={})
    if left_out := [name for name, tensor in _tensors(model) if _unwritten(tensor)]:
        _construct(model, cls, config, seed, left_out)
    del model._weight_conversions  # only for weights of a checkpoint
    model.config.name_or_path = model.name_or_path = ""  # transformers makes it "None"
    return model.train()


def load(
    cls: type[PreTrainedModel],
    source: str | None,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    prune: Callable[[PreTrainedModel], Any],
    axes: AxisGroups | None = None,
    **options: Any,
) -> Any:
    """Call ``cls.from_pretrained(source)`` for a model that is pruned before memory is allocated.

    Args:
        source: folder or hub name. None initialises all weights.
        prune: called on the model before memory is allocated.
        axes: groups that divide each layer. If possible, only this rank's part is read from the files.
        options: further arguments of ``from_pretrained``, whose result is returned.
    """

    def __init__(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        prune(self)
        self._keys_to_ignore_on_load_unexpected = {r".*"}

    def initialize_weights(self: PreTrainedModel) -> None:
        if source is None:  # weights without a rule must not be uninitialised memory
            for _, tensor in _tensors(self):
                if not getattr(tensor, "_is_hf_initialized", False):
                    _blank(tensor)
        _initialize(self, seed)

    members: dict[str, Any] = {
        "__init__": __init__,
        "initialize_weights": initialize_weights,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    if axes is not None and axes != AxisGroups():
        members["_load_pretrained_model"] = staticmethod(reading_parts(cls._load_pretrained_model, axes))
    part: Any = new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(members))
    with quiet():
        loaded = part.from_pretrained(source, config=config, dtype=dtype, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = cls
    return loaded


@torch.no_grad()
def _construct(
    model: PreTrainedModel, cls: type[PreTrainedModel], config: PreTrainedConfig, seed: int, names: list[str]
) -> None:
    """Set the named weights, which Hugging Face's rules do not cover, by constructing the whole model."""
    count = sum(parameter.numel() for parameter in skeleton(cls, config).parameters())
    if count > MAX_CONSTRUCTED:
        raise ValueError(
            f"model: transformers leaves {names[0]} and {len(names) - 1} more weights of a new {cls.__name__} to its "
            f"constructor, which makes the whole model ({count:,} weights); save one from "
            "AutoModelForCausalLM.from_config, and give its folder as model.path"
        )
    with seeded(seed, "constructor"), quiet():
        whole = cls(copy.deepcopy(config))
    constructed = dict(_tensors(whole))
    for name, tensor in _tensors(model):
        if name in names:
            tensor.copy_(constructed[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _blank(tensor: Tensor) -> None:
    """Fill a tensor with the value that `_unwritten` detects. Booleans are left unchanged."""
    if tensor.dtype is not torch.bool:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def _unwritten(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


@contextlib.contextmanager
def _own_layers_only(model: nn.Module) -> Iterator[None]:
    """Context in which lists of layers have no placeholders, because some models iterate over layers to initialise
    them.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    whole = [dict(layers._modules) for layers in lists]
    for layers in lists:
        for name, layer in list(layers._modules.items()):
            if isinstance(layer, Placeholder):
                del layers._modules[name]
    try:
        yield
    finally:
        for layers, modules in zip(lists, whole, strict=True):
            layers._modules.clear()
            layers._modules.update(modules)


@torch.no_grad()
@guard_torch_init_functions()
def _initialize(model: PreTrainedModel, seed: int) -> None:
    """Initialise as ``PreTrainedModel.initialize_weights`` does, with a separate seed for each module."""

    def visit(module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        for key, child in module.named_children():
            visit(child, f"{name}.{key}", child if isinstance(child, PreTrainedModel) else owner)
        with seeded(seed, name):
            owner._initialize_weights(module, model.is_custom_code())

    fresh = [p for p in model.parameters() if not getattr(p, "_is_hf_initialized", False)]
    low = [(p, p.dtype) for p in fresh if p.dtype in (torch.bfloat16, torch.float16)]
    for parameter, _ in low:
        parameter.data = parameter.data.float()
    with _own_layers_only(model):
        visit(model, "", model)
    for parameter, dtype in low:
        parameter.data = parameter.data.to(dtype)
