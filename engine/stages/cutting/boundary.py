"""Boundary tensors of each cut: the hidden state, and other outputs of earlier layers that later layers take."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from transformers import PreTrainedConfig, PreTrainedModel

import weft.engine.models.batch  # noqa: F401  (answers for positions on the meta device)
from weft.engine.models.skeleton import set_dtype, skeleton
from weft.engine.stages.cutting.provenance import Entry, Provenance, Taken, memory


@dataclass(frozen=True)
class Slot:
    """Destination of a boundary tensor: an argument of a layer, or an element of a nested argument."""

    layer: int
    entry: Entry
    place: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A tensor that crosses a cut between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    """Destinations of the tensor, the earliest layer first."""


Boundary = tuple[Part, ...]
"""The tensors that cross one cut, the hidden state first."""


def boundaries(taken: Sequence[Taken], num_layers: int) -> list[Boundary]:
    """Return the boundary tensors before each layer. The modules before the layers make the first layer's.

    Args:
        taken: tensors that the layers of a model take in one forward, in order.
    """
    return [_boundary([take for take in taken if take.layer >= cut > take.maker]) for cut in range(num_layers)]


def _boundary(crossing: Sequence[Taken]) -> Boundary:
    parts: dict[tuple[object, ...], list[Taken]] = {}
    for take in crossing:
        tensor = take.tensor
        same = memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        parts.setdefault(same, []).append(take)
    return tuple(
        Part(
            tuple(takes[0].tensor.shape),
            takes[0].tensor.dtype,
            tuple(Slot(take.layer, take.entry, take.place) for take in takes),
        )
        for takes in parts.values()
    )


class BoundaryTracer:
    """Boundary tensors of a whole model for any shape of micro-batch, traced on the meta device."""

    def __init__(self, cls: type[PreTrainedModel], config: PreTrainedConfig, layers: str) -> None:
        """Store the model's class, its config and the path of its layers.

        Args:
            layers: path of the list of decoder layers.
        """
        self._cls, self._config, self._layers = cls, config, layers
        self._known: dict[tuple[tuple[int, ...], torch.dtype], list[Boundary]] = {}

    def boundary(self, cut: int, shape: Sequence[int], dtype: torch.dtype) -> Boundary:
        """Return the boundary tensors before a layer.

        Args:
            cut: index of the layer after the cut.
            shape: shape [B, S] of the micro-batch's token ids.

        Raises:
            ValueError: the model does not run on the meta device.
        """
        key = tuple(shape), dtype
        if key not in self._known:
            self._known[key] = self._look(*key)
        return self._known[key][cut]

    def _look(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Boundary]:
        config = copy.deepcopy(self._config)
        if config._attn_implementation not in (None, "eager", "sdpa"):
            config._attn_implementation = "sdpa"
        model = skeleton(self._cls, config).eval()
        for part in model.modules():
            if isinstance(part, PreTrainedModel):  # some examine the ids for padding
                part.warn_if_padding_and_no_attention_mask = lambda *_: None
        set_dtype(model, dtype)
        if self._cls._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # its shapes do not depend on the routers' choices
        layers = model.get_submodule(self._layers)
        assert isinstance(layers, nn.ModuleList)
        provenance = Provenance(model, layers)
        try:
            with provenance.watching(), _config.patch(meta_nonzero_assume_all_nonzero=True):
                model(input_ids=torch.ones(shape, dtype=torch.long, device="meta"), use_cache=False)
        except Exception as error:  # any, because this runs Hugging Face's or the model's own code
            raise ValueError(
                f"model: the layers of {self._cls.__name__} hand each other more than the hidden state, and how much "
                f"is not known beforehand ({type(error).__name__}: {' '.join(str(error).split())}); choose another "
                "architecture, or run it whole with pipeline.stages=1"
            ) from error
        return boundaries(provenance.taken, len(layers))


Parts = Sequence[tuple[Sequence[int], torch.dtype]]
"""Shapes and types of packed tensors."""
ALIGNMENT = 16
"""Alignment of each packed tensor in bytes."""


def packed_size(parts: Parts, dtype: torch.dtype) -> int:
    """Return the length of the packed tensor in elements of ``dtype``."""
    return sum(_room(shape, kind) for shape, kind in parts) // dtype.itemsize


def pack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Pack tensors, bit for bit, into one tensor [elements]. Its gradient contains their gradients, packed alike."""
    return _Pack.apply(dtype, *tensors)


def unpack(packed: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    """Return the tensors with the given shapes and types that `pack` packed."""
    return _Unpack.apply(packed, parts)


def _room(shape: Sequence[int], dtype: torch.dtype) -> int:
    size = torch.Size(shape).numel() * dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.parts = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return _join(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = _part(gradient, ctx.parts)
        return None, *(part if part.is_floating_point() else None for part in found)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, parts: Parts) -> tuple[Tensor, ...]:
        ctx.parts, ctx.dtype = parts, packed.dtype
        found = _part(packed, parts)
        ctx.mark_non_differentiable(*(part for part in found if not part.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        given = [
            torch.zeros(shape, dtype=dtype, device=gradients[0].device) if not dtype.is_floating_point else gradient
            for gradient, (shape, dtype) in zip(gradients, ctx.parts, strict=True)
        ]
        return _join(given, ctx.dtype), None


def _join(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    rooms = [_room(tensor.shape, tensor.dtype) for tensor in tensors]
    bits = torch.zeros(sum(rooms), dtype=torch.uint8, device=tensors[0].device)
    for tensor, room in zip(tensors, bits.split(rooms), strict=True):
        room[: tensor.numel() * tensor.element_size()] = tensor.contiguous().reshape(-1).view(torch.uint8)
    return bits.view(dtype)


def _part(packed: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    bits = packed.contiguous().view(torch.uint8)
    found, start = [], 0
    for shape, dtype in parts:
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append(bits[start : start + size].view(dtype).view(tuple(shape)).clone())
        start += _room(shape, dtype)
    return tuple(found)
