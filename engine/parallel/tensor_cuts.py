"""The parts of parameters that a member of a tensor group has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from weft.engine.parallel.axis import AxisGroup, UnshareableError
from weft.engine.parallel.cut import Cut, held_cut, set_held
from weft.engine.parallel.tensor_styles import Style, TensorPlan

HEADS = ("num_attention_heads", "num_key_value_heads")
"""Fields of Hugging Face's configs with numbers of attention heads."""
_FACTOR = re.compile(r"lora_[AB]\.[^.]+\.weight")


def tensor_cuts(model: PreTrainedModel, plan: TensorPlan, group: AxisGroup, layers: str) -> dict[str, Cut]:
    """Return this member's parts of the parameters that a tensor group divides.

    The model's plan divides matrices in decoder layers. Embedding and head are divided by vocabulary.

    Args:
        model: a model whose parameters are undivided, except those that `set_held` marked. Some of its modules may be
            placeholders.
        layers: path of the list of decoder layers.

    Returns:
        Parts by parameter names in ``model``.

    Raises:
        UnshareableError: a parameter cannot be divided evenly, or has an adapter that cannot be divided.
    """
    _require_factors(model, plan, group.size, layers)
    cuts: dict[str, Cut] = {}
    known: dict[int, Cut] = {}
    for path, module in model.get_submodule(layers).named_modules(prefix=layers):
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            place = _place(plan, full, name, parameter.dim(), path)
            if place is not None:
                dim, blocks = place
                cuts[full] = held_cut(parameter) or _cut(full, tuple(parameter.shape), dim, group, blocks)
    for full, parameter in _by_vocabulary(model):
        done = held_cut(parameter)  # read in parts, shared by stages, or with two names
        if done is None and (words := parameter.shape[0]) % group.size:
            raise UnshareableError(
                f"parallel.tensor={group.size}: {full} has {words} tokens, which {group.size} ranks cannot divide "
                f"evenly; for a new model set model.overrides.vocab_size={words + -words % group.size}, otherwise "
                f"choose a divisor of {words}"
            )
        cuts[full] = done or known.setdefault(id(parameter), _cut(full, tuple(parameter.shape), 0, group))
    return cuts


def require_divisible(model: PreTrainedModel, plan: TensorPlan, size: int, layers: str) -> None:
    """Check that a tensor group can divide the matrices and attention heads of a whole model.

    Raises:
        UnshareableError: it cannot divide them. The message names the part and the remedy.
    """
    if not any(True for _ in _divided(model, plan, layers)):
        raise UnshareableError(
            f"parallel.tensor={size}: transformers has no tensor-parallel plan for the layers of "
            f"{type(model).__name__}; set parallel.tensor=1"
        )
    config = model.config.get_text_config()
    for name in HEADS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            raise UnshareableError(
                f"parallel.tensor={size}: {type(model).__name__} has {name}={count}, which {size} ranks cannot divide "
                f"evenly; choose a divisor of {count}"
            )
    if getattr(config, "router_jitter_noise", 0):
        raise UnshareableError(
            f"parallel.tensor={size}: members of {type(model).__name__} would choose different experts for a token; "
            "set model.overrides.router_jitter_noise=0"
        )


def _divided(model: PreTrainedModel, plan: TensorPlan, layers: str) -> Iterator[str]:
    for path, module in model.get_submodule(layers).named_modules(prefix=layers):
        for name, parameter in module.named_parameters(recurse=False):
            if _place(plan, f"{path}.{name}", name, parameter.dim(), path) is not None:
                yield path


def _require_factors(model: PreTrainedModel, plan: TensorPlan, size: int, layers: str) -> None:
    """Check that adapters of divided matrices are plain LoRA with two factors."""
    for path, module in model.get_submodule(layers).named_modules(prefix=layers):
        if not isinstance(module, BaseTunerLayer):
            continue
        adapted = getattr(module, "parameter_name", "")  # of a module whose parameter peft adapts, such as experts
        if adapted and plan.style(f"{path}.{adapted}") is not None:
            raise UnshareableError(
                f"parallel.tensor={size}: {path} has an adapter of its {adapted}, which cannot be divided as it is; "
                "leave it out of the adapter's targets, or set parallel.tensor=1"
            )
        if plan.style(path) is None:
            continue
        own = [name for name, _ in module.named_parameters() if not name.startswith("base_layer.")]
        if other := [name for name in own if not _FACTOR.fullmatch(name)]:
            raise UnshareableError(
                f"parallel.tensor={size}: the adapter of {path} has {other[0]}, which cannot be divided as its matrix "
                "is; use plain LoRA (without DoRA or lora_bias) there, or set parallel.tensor=1"
            )


def _place(plan: TensorPlan, full: str, name: str, dims: int, path: str) -> tuple[int, int] | None:
    """Return the dimension along which a parameter is divided, and the number of blocks, or None if it is undivided."""
    if ".lora_" in full:
        return _place_of_factor(plan, full)
    style = plan.style(full) or plan.style(path)
    if style is None:
        return None
    if style.sums:
        return None if dims == 1 else (dims - 1, 1)
    if style is Style.packed_last:
        return dims - 1, 2
    return max(0, dims - 2), 2 if style is Style.packed_columns else 1


def _place_of_factor(plan: TensorPlan, full: str) -> tuple[int, int] | None:
    """Return how an adapter's factor is divided, or None if it is not.

    Factor B is divided if its matrix is divided by columns, and factor A if its matrix is divided by rows.
    """
    base, _, factor = full.partition(".lora_")
    style = plan.style(base)
    if style is None or not full.endswith(".weight"):
        return None
    if style.sums:
        return (1, 1) if factor.startswith("A.") else None
    return (0, 2 if style is Style.packed_columns else 1) if factor.startswith("B.") else None


def _by_vocabulary(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of embedding and head, under all of their names."""
    wanted = set()
    for unit in (model.get_input_embeddings(), model.get_output_embeddings()):
        if unit is not None:
            copied = isinstance(unit, ModulesToSaveWrapper)
            wanted |= {id(parameter) for parameter in unit.parameters(recurse=copied)}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in wanted:
            yield full, parameter


def _cut(name: str, shape: tuple[int, ...], dim: int, group: AxisGroup, blocks: int = 1) -> Cut:
    if shape[dim] % (group.size * blocks):
        raise UnshareableError(
            f"parallel.tensor={group.size}: {name} has the shape {list(shape)}, of which {group.size} ranks "
            f"cannot divide dimension {dim} evenly{' in two halves' if blocks == 2 else ''}; choose another number"
        )
    return Cut(shape, dim, group.index, group.size, blocks)


def hold_in_place(model: nn.Module, cuts: dict[str, Cut]) -> None:
    """Replace the data of each parameter by its part. The parameter objects stay the same, so they remain shared."""
    for name, cut in cuts.items():
        parameter = model.get_parameter(name)
        if held_cut(parameter) is not cut:
            parameter.data = cut.take(parameter.detach())
            set_held(parameter, cut)
