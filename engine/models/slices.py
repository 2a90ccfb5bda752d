"""Slices: a rank reads only its part of each weight from a model's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from weft.engine.models.skeleton import decoder_layers
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.cut import Cut, set_held
from weft.engine.parallel.experts import expert_cuts
from weft.engine.parallel.tensor_cuts import tensor_cuts
from weft.engine.parallel.tensor_styles import TensorPlan

Load = Callable[..., Any]
"""Type of `PreTrainedModel._load_pretrained_model`, which loads files, or tensors by name, into a model."""
NOTHING = object()
"""Stands for a tensor that only other ranks need, so that it is not read."""


@dataclass(frozen=True)
class Slice:
    """A part of a tensor in a file, which is read when transformers indexes it."""

    source: Any
    cut: Cut

    def get_dtype(self) -> str:
        """Return the tensor's dtype."""
        return self.source.get_dtype()

    def get_shape(self) -> list[int]:
        """Return the part's shape."""
        return list(self.cut.held_shape)

    def __getitem__(self, index: Any) -> Tensor:
        assert index is Ellipsis
        before = (slice(None),) * self.cut.dim
        parts = [self.source[(*before, slice(start, stop))] for start, stop in self.cut.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.cut.dim)


def reading_parts(load: Load, axes: AxisGroups) -> Load:
    """Wrap a model's ``load``, so that it reads only this rank's parts of divided weights if possible.

    If transformers stacks or concatenates a weight from several tensors, each tensor is read in part, too. Weights that
    it composes in other ways are read completely, and `take_part` cuts them.
    """

    def load_parts(
        model: PreTrainedModel, state_dict: Any, files: Sequence[str] | None, load_config: Any, *more: Any, **named: Any
    ) -> Any:
        if state_dict is not None or not files or not all(file.endswith(".safetensors") for file in files):
            return load(model, state_dict, files, load_config, *more, **named)
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in files]
            found = {key: file.get_slice(key) for file in opened for key in file.offset_keys()}
            cuts = _cuts(model, axes)
            wanted, held = dict[str, Any](found), dict[str, Cut]()
            for name, sources in _targets(model, found, load_config).items():
                cut = cuts.get(name)
                if cut is None:
                    continue
                parts = {key: _part(key, found[key], cut, converter) for key, converter in sources.items()}
                if None in parts.values():
                    continue
                held[name] = cut
                for key, part in parts.items():
                    wanted[key] = part
                    if part is NOTHING:
                        del wanted[key]
            _shrink(model, held)
            result = load(model, wanted, None, load_config, *more, **named)
            for name, cut in held.items():
                set_held(model.get_parameter(name), cut)
            return result

    return load_parts


def _cuts(model: PreTrainedModel, axes: AxisGroups) -> Mapping[str, Cut]:
    cuts = expert_cuts(model, axes.expert)
    if axes.tensor.size > 1:
        cuts = tensor_cuts(model, TensorPlan(model), axes.tensor, decoder_layers(model)) | cuts
    return cuts


def _targets(
    model: PreTrainedModel, keys: Mapping[str, Any], load_config: Any
) -> dict[str, dict[str, WeightConverter | None]]:
    """Return the file's tensors that compose each weight, each with the operation that combines them, or None."""
    mapping = load_config.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    targets = dict[str, dict[str, WeightConverter | None]]()
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        targets.setdefault(name, {})[key] = None if pattern is None else by_pattern[pattern]
    return targets


def _part(key: str, source: Any, cut: Cut, converter: WeightConverter | None) -> Any:
    """Return what to read of a file's tensor for a part of a weight.

    Args:
        source: safetensors' slice of the tensor.
        cut: the part of the weight that consists of this tensor, or of several.
        converter: the operation that combines several tensors, or None.

    Returns:
        A slice, `NOTHING` if other ranks need the tensor, or None if the part of the tensor is unknown.
    """
    shape = tuple(source.get_shape())
    if converter is None:
        return Slice(source, cut) if shape == cut.shape else None
    if cut.axis == "expert":
        number = _expert(key, converter)
        if number is None:
            return None
        return source if any(start <= number < stop for start, stop in cut.ranges) else NOTHING
    own = _cut_of_source(shape, cut, converter)
    return None if own is None else Slice(source, own)


def _cut_of_source(shape: tuple[int, ...], cut: Cut, converter: WeightConverter) -> Cut | None:
    """Return the part of one of the tensors of a stacked or concatenated weight, or None for other compositions."""
    operations = list(converter.operations)
    stacked = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    joins = operations[1:] if stacked else operations
    if len(joins) > 1 or not all(isinstance(join, Concatenate) for join in joins):
        return None
    whole, blocks = [*cut.shape[:1], *shape] if stacked else list(shape), cut.blocks
    for join in joins:
        count = len(converter.source_patterns)
        whole[join.dim] *= count
        if join.dim == cut.dim:
            if blocks % count:
                return None  # a member's part differs between them
            blocks //= count
    if tuple(whole) != cut.shape or cut.dim < stacked:
        return None
    return replace(cut, shape=shape, dim=cut.dim - stacked, blocks=blocks)


def _expert(key: str, converter: WeightConverter) -> int | None:
    """Return the number of the expert that a tensor belongs to, or None if a layer's experts are not stacked."""
    if not (isinstance(converter.operations[0], MergeModulelist) and converter.operations[0].dim == 0):
        return None
    match = re.search(r"experts\.(\d+)\.", key)
    return int(match[1]) if match else None


def _shrink(model: PreTrainedModel, held: Mapping[str, Cut]) -> None:
    """Replace the weights of parts, which are on the meta device, by weights with the parts' shapes."""
    for name, cut in held.items():
        path, _, own = name.rpartition(".")
        whole = model.get_parameter(name)
        assert whole.is_meta
        part = torch.empty(cut.held_shape, dtype=whole.dtype, device="meta")
        setattr(model.get_submodule(path), own, nn.Parameter(part, requires_grad=whole.requires_grad))
