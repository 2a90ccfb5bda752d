"""How many weights each part of a model has, and how many of them a token meets."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.engine.stages.skeleton import decoder_layers, model_class, skeleton


@dataclass(frozen=True)
class PartSize:
    """Weights of a part of the model."""

    parameters: int
    """All of them."""
    active: int
    """Those that one token is multiplied with: of a mixture of experts the chosen ones, of an
    embedding none. A forward takes twice as many floating-point operations per token."""

    def __add__(self, other: PartSize) -> PartSize:
        return PartSize(self.parameters + other.parameters, self.active + other.active)


@dataclass(frozen=True)
class ModelSizes:
    """Weights of the embedding, of each decoder layer, and of the final norm and head."""

    before: PartSize
    layers: tuple[PartSize, ...]
    after: PartSize
    tied: int
    """Weights that the embedding and the head share; counted in both."""
    hidden_size: int
    """Elements of a token's hidden state."""
    vocab_size: int
    """Logits of a token."""

    @property
    def largest_layer(self) -> int:
        """Weights of the largest decoder layer."""
        return max(layer.parameters for layer in self.layers)


def model_sizes(config: PreTrainedConfig) -> ModelSizes:
    """Count a model's weights without making them."""
    model = skeleton(model_class(config), config)
    path = decoder_layers(model)
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    head = model.get_output_embeddings()
    head_weights = sum(p.numel() for p in head.parameters()) if head is not None else 0
    text = config.get_text_config()
    outside = sum(p.numel() for name, p in model.named_parameters() if not name.startswith(f"{path}."))
    tied = sum(p.numel() for p in head.parameters()) if head is not None and model.all_tied_weights_keys else 0
    return ModelSizes(
        before=PartSize(outside - (0 if tied else head_weights), 0),
        layers=tuple(_layer_size(layer, model) for layer in layers),
        after=PartSize(head_weights, head_weights),
        tied=tied,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def _layer_size(layer: nn.Module, model: PreTrainedModel) -> PartSize:
    config = model.config.get_text_config()
    total = active = 0
    for name, parameter in layer.named_parameters():
        total += parameter.numel()
        chosen, experts = chosen_experts(config)
        routed = experts and ".experts." in f".{name}"
        active += parameter.numel() * chosen // experts if routed else parameter.numel()
    return PartSize(total, active)


def chosen_experts(config: PreTrainedConfig) -> tuple[int, int]:
    """Experts that a token is sent to, and how many there are; (0, 0) for a dense model."""
    experts = next((getattr(config, name) for name in EXPERT_COUNTS if getattr(config, name, None)), 0)
    chosen = next((getattr(config, name) for name in CHOSEN_COUNTS if getattr(config, name, None)), experts)
    return (chosen, experts) if experts else (0, 0)


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names that Hugging Face configs have for the number of experts."""
CHOSEN_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Names that they have for the number of experts per token."""
