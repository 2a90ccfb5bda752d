"""Number of weights of each part of a model, and how many of them a token uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.conf.schema import LoraConfig
from weft.engine.models.lazy_logits import whole_logits_reason
from weft.engine.models.lora import add_adapters
from weft.engine.models.quantization import BaseQuantization, scale_bytes
from weft.engine.models.skeleton import copied, decoder_layers, hf_model, model_class, skeleton
from weft.engine.parallel.axis import Alone
from weft.engine.parallel.context_exchange import key_value_size
from weft.engine.parallel.cut import Cut
from weft.engine.parallel.experts import expert_cuts, require_experts, require_grouped_rows
from weft.engine.parallel.tensor import require_shareable
from weft.engine.parallel.tensor_cuts import tensor_cuts
from weft.engine.parallel.tensor_styles import TensorPlan

FOUR_BIT_BYTES = 0.5
"""Bytes of a weight with 4 bits, without its scale."""


@dataclass(frozen=True)
class PartSize:
    """Numbers of weights of a part of the model."""

    parameters: int
    """Number of all weights."""
    active: int
    """Number of weights that one token is multiplied with.

    In a mixture these are the weights of the chosen experts; in an embedding there are none. A forward takes twice as
    many floating-point operations per token.
    """
    held: int = -1
    """Number of weights that one rank has, if several ranks share a layer. By default all of `parameters`."""
    largest: int = 0
    """Number of elements that one rank has of the largest trained parameter."""
    trained: int = -1
    """Number of trained weights among `parameters`. All by default."""
    held_trained: int = -1
    """Number of trained weights among `held`. All by default."""
    active_trained: int = -1
    """Number of trained weights among `active`. All by default."""
    four_bit: int = 0
    """Number of weights with 4 bits among `held`. Ranks do not share layers with such weights."""
    scale_bytes: float = 0.0
    """Bytes of the scales of weights with 4 bits."""
    largest_four_bit: int = 0
    """Number of elements of the largest parameter with 4 bits, which a computation expands."""
    tensors: int = 0
    """Number of trained parameters."""

    def __post_init__(self) -> None:
        """Set defaults: a rank has all weights, and all are trained."""
        if self.held < 0:
            object.__setattr__(self, "held", self.parameters)
        if self.trained < 0:
            object.__setattr__(self, "trained", self.parameters)
        if self.held_trained < 0:
            object.__setattr__(self, "held_trained", self.held)
        if self.active_trained < 0:
            object.__setattr__(self, "active_trained", self.active)

    def __add__(self, other: PartSize) -> PartSize:
        return PartSize(
            self.parameters + other.parameters,
            self.active + other.active,
            self.held + other.held,
            max(self.largest, other.largest),
            self.trained + other.trained,
            self.held_trained + other.held_trained,
            self.active_trained + other.active_trained,
            self.four_bit + other.four_bit,
            self.scale_bytes + other.scale_bytes,
            max(self.largest_four_bit, other.largest_four_bit),
            self.tensors + other.tensors,
        )

    def without(self, other: PartSize) -> PartSize:
        """Return this part's size without the weights of ``other``, which were counted twice. Active weights stay."""
        return PartSize(
            self.parameters - other.parameters,
            self.active,
            self.held - other.held,
            self.largest,
            self.trained - other.trained,
            self.held_trained - other.held_trained,
            self.active_trained,
            self.four_bit - other.four_bit,
            self.scale_bytes - other.scale_bytes,
            self.largest_four_bit,
            self.tensors - other.tensors,
        )

    def stored(self, weight_bytes: int) -> float:
        """Return the number of weights of ``weight_bytes`` that fill the memory of `held` without scales."""
        return self.held - self.four_bit * (1 - FOUR_BIT_BYTES / weight_bytes)


NOTHING = PartSize(0, 0)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the embedding, of each decoder layer, and of the final norm and head."""

    before: PartSize
    layers: tuple[PartSize, ...]
    after: PartSize
    hidden_size: int
    """Number of elements of a token's hidden state."""
    vocab_size: int
    """Number of logits of a token."""
    key_value_size: int = 0
    """Number of elements of a token's keys and values in a layer, or 0 if unknown."""
    chunks_loss: bool = False
    """True if its loss can be computed in chunks of logits."""
    tied: PartSize = NOTHING
    """Weights that the embedding and the head share, which are counted in both."""

    def largest_layer(self, weight_bytes: int) -> float:
        """Return the largest `PartSize.stored` of a decoder layer."""
        return max(layer.stored(weight_bytes) for layer in self.layers)

    @property
    def largest_trained_layer(self) -> int:
        """Largest number of trained weights that a rank has of a decoder layer."""
        return max(layer.held_trained for layer in self.layers)


def model_sizes(
    given: PreTrainedConfig | nn.Module,
    *,
    lora: LoraConfig | None = None,
    quantized: BaseQuantization | None = None,
    tensor: int = 1,
    expert: int = 1,
    dtype: torch.dtype | None = None,
) -> ModelSizes:
    """Count a model's weights, and the trained ones among them, without allocating them.

    Args:
        given: config of a model that will be made, or a model, which may have peft's wrapper.
        lora: adapters of a model that will be made.
        quantized: 4-bit weights of a model that will be made.
        tensor, expert: sizes of the groups that share matrices and experts.
        dtype: type of the computations. If given, check that a rank's parts of experts support it.

    Raises:
        UnshareableError: the groups cannot divide the model.
    """
    if quantized is not None:
        quantized.require_whole_layers(tensor=tensor, expert=expert)
    model = hf_model(meta_model(given, lora, quantized))
    path = decoder_layers(model)
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    cuts = divided_parameters(model, path, tensor=tensor, expert=expert)
    if dtype is not None:
        require_grouped_rows(model, cuts, dtype, tensor)
    inside = {id(parameter) for parameter in layers.parameters()}
    of_head, of_embedding = (
        _identities(part) for part in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    outside = {id(parameter) for parameter in model.parameters()} - inside
    before = part_size(model, cuts, outside - (of_head - of_embedding))
    text = model.config.get_text_config()
    return ModelSizes(
        before=replace(before, active=0, active_trained=0),
        layers=tuple(part_size(model, cuts, {id(parameter) for parameter in layer.parameters()}) for layer in layers),
        after=part_size(model, cuts, of_head),
        tied=part_size(model, cuts, of_head & of_embedding),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        key_value_size=key_value_size(model.config),
        chunks_loss=not whole_logits_reason(model),
    )


def _identities(part: nn.Module | None) -> set[int]:
    return set() if part is None else {id(parameter) for parameter in part.parameters()}


def divided_parameters(model: PreTrainedModel, layers: str, *, tensor: int = 1, expert: int = 1) -> dict[str, Cut]:
    """Return a rank's parts of divided parameters, by the parameters' names."""
    cuts: dict[str, Cut] = {}
    if tensor > 1:
        require_shareable(model, tensor, layers)
        cuts |= tensor_cuts(model, TensorPlan(model), Alone("tensor", tensor), layers)
    if expert > 1:
        require_experts(model, expert)
        cuts |= expert_cuts(model, Alone("expert", expert))
    return cuts


def part_size(model: PreTrainedModel, cuts: Mapping[str, Cut], wanted: set[int]) -> PartSize:
    """Return the size of the parameters whose ``id`` is in ``wanted``."""
    chosen, experts = chosen_experts(model.config.get_text_config())
    total = active = held = largest = trained = held_trained = active_trained = 0
    four_bit, in_scales, expanded, tensors = 0, 0.0, 0, 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in wanted:
            continue
        count = parameter.numel()
        total += count
        here = cuts[name].num_elements if name in cuts else count
        held += here
        met = count * chosen // experts if experts and ".experts." in name else count
        active += met
        if each := scale_bytes(parameter):
            four_bit, in_scales, expanded = four_bit + here, in_scales + each * here, max(expanded, here)
        if parameter.requires_grad:
            trained, held_trained, largest = trained + count, held_trained + here, max(largest, here)
            active_trained, tensors = active_trained + met, tensors + 1
    of_bits = four_bit, in_scales, expanded
    return PartSize(total, active, held, largest, trained, held_trained, active_trained, *of_bits, tensors)


def chosen_experts(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of experts per token and of all experts, or (0, 0) for a dense model."""
    experts = next((getattr(config, name) for name in EXPERT_COUNTS if getattr(config, name, None)), 0)
    chosen = next((getattr(config, name) for name in CHOSEN_COUNTS if getattr(config, name, None)), experts)
    return (chosen, experts) if experts else (0, 0)


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of Hugging Face configs with the number of experts."""
CHOSEN_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Fields of Hugging Face configs with the number of experts per token."""


def meta_model(
    trained: PreTrainedConfig | nn.Module,
    lora: LoraConfig | None = None,
    quantized: BaseQuantization | None = None,
) -> nn.Module:
    """Return the whole model on the meta device as it will be trained, with adapters.

    Args:
        trained: config of a model that will be made, or a model, which may have peft's wrapper and is not changed.
        lora: adapters of a model that will be made.
        quantized: 4-bit weights of a model that will be made, which are marked and not cast.

    Raises:
        ValueError: transformers cannot build the model, or its adapters have no targets.
    """
    if isinstance(trained, nn.Module):
        return _copy(trained)
    model = skeleton(model_class(trained), trained)
    if quantized is not None:
        quantized.mark(model)
    return model if lora is None or not lora.enabled else add_adapters(model, lora, seed=0)


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device."""
    tensors: dict[int, Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return copied(model, tensors | {id(buffer): buffer.to("meta") for buffer in model.buffers()})
