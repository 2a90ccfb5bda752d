"""New weights that depend on the seed and on a module's name, not on what else is there."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from types import new_class
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from weft.engine.stages.skeleton import quiet


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Random numbers on the CPU for ``name`` alone; the caller's generators are left as they were."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def new_model(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    prune: Callable[[PreTrainedModel], Any] = lambda model: None,
) -> PreTrainedModel:
    """A model with new weights, initialised by Hugging Face's rules, in training mode.

    Numbers are drawn in fp32 for one module at a time, so a pruned model has the same weights
    as the whole one, and a bf16 model those of the fp32 one, rounded.

    Args:
        prune: called on the model before it takes up memory.
    """
    model = load(cls, None, config, dtype=dtype, seed=seed, prune=prune, state_dict={})
    del model._weight_conversions  # those of a checkpoint, which there is none of
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
    **options: Any,
) -> Any:
    """``cls.from_pretrained(source)`` of a model that is pruned before it takes up memory."""

    def __init__(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        prune(self)
        self._keys_to_ignore_on_load_unexpected = {r".*"}

    def initialize_weights(self: PreTrainedModel) -> None:
        _initialize(self, seed)

    members = {
        "__init__": __init__,
        "initialize_weights": initialize_weights,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    part: Any = new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(members))
    with quiet():
        loaded = part.from_pretrained(source, config=config, dtype=dtype, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = cls
    return loaded


@torch.no_grad()
@guard_torch_init_functions()
def _initialize(model: PreTrainedModel, seed: int) -> None:
    """What ``PreTrainedModel.initialize_weights`` does, with a seed per module."""

    def visit(module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        for key, child in module.named_children():
            visit(child, f"{name}.{key}", child if isinstance(child, PreTrainedModel) else owner)
        with seeded(seed, name):
            owner._initialize_weights(module, model.is_custom_code())

    fresh = [p for p in model.parameters() if not getattr(p, "_is_hf_initialized", False)]
    low = [(p, p.dtype) for p in fresh if p.dtype in (torch.bfloat16, torch.float16)]
    for parameter, _ in low:
        parameter.data = torch.empty_like(parameter, dtype=torch.float32)
    visit(model, "", model)
    for parameter, dtype in low:
        parameter.data = parameter.data.to(dtype)
