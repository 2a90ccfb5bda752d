"""Boundary tensors of each cut: the hidden state, and other outputs of earlier layers that later layers take."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx.experimental import _config
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

import weft.engine.stages.packed  # noqa: F401  (answers for positions on the meta device)
from weft.engine.stages.provenance import Entry, Provenance, Taken, memory
from weft.engine.stages.skeleton import skeleton


@dataclass(frozen=True)
class Slot:
    """A destination of a tensor: an argument of a layer, or an element of it."""

    layer: int
    entry: Entry
    place: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A tensor that crosses a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    """Its destinations, the earliest layer first."""


Boundary = tuple[Part, ...]
"""The tensors that cross one cut, the hidden state first."""


def boundaries(taken: Sequence[Taken], num_layers: int) -> list[Boundary]:
    """Return the boundary tensors before each layer. Those of the first come from the modules before the layers.

    Args:
        taken: tensors that the layers of a model take in one forward, in order.
        num_layers: of the model.
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


class Handover:
    """The boundary tensors of a whole model, for any shape of micro-batch, traced without memory for weights."""

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
            cut: the layer.
            shape: of the micro-batch's token ids, [B, S].
            dtype: of the model.

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


def set_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast weights to the types in which transformers loads them."""
    plan = model._get_dtype_plan(dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not (kept and kept.search(name)):
            parameter.data = parameter.data.to(dtype)
