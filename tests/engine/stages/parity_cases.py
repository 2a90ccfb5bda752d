"""Cases of the parity tests: small models of every supported architecture, in variants, on a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tests.engine.stages.tiny_models import VOCABULARY, tiny_model
from weft.conf.schema import ModelConfig, SplitKind
from weft.engine.models.batch import Batch
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.loading import build_model, load_hf_config, load_stages

SEED = 1
"""Seed of new weights."""


@dataclass(frozen=True)
class ParityCase:
    """A model and a batch on which a backend is compared with Hugging Face."""

    arch: str
    variant: str
    num_stages: int
    model: ModelConfig
    dtype: torch.dtype
    batch: Batch
    num_items: Tensor
    """Tokens that the loss is divided by; more than in the batch, as in a step of several."""

    @property
    def microbatches(self) -> list[Batch]:
        """The batch, one sequence at a time."""
        count = len(self.batch["input_ids"])
        return [{name: tensor[m : m + 1] for name, tensor in self.batch.items()} for m in range(count)]

    def whole(self) -> nn.Module:
        """Return the whole model as transformers (and peft) create it."""
        model = build_model(self.model, dtype=self.dtype, seed=SEED)
        _wake_adapters([model])
        return model

    def stages(self, held: Sequence[int]) -> list[Stage]:
        """Return stages of the same model."""
        split = split_layers(load_hf_config(self.model), self.num_stages, SplitKind.even)
        stages = load_stages(self.model, split, held, dtype=self.dtype, seed=SEED)
        _wake_adapters(stages)
        return stages


def _wake_adapters(models: Sequence[nn.Module]) -> None:
    """Give the second matrix of each new adapter weights, equal in every split, because new adapters add nothing."""
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))


_plain = partial(tiny_model, tie_word_embeddings=False)


def _adapted(arch: str) -> ModelConfig:
    config = _plain(arch)
    config.lora.enabled = True
    config.lora.target_modules = TARGETS.get(arch, ["q_proj", "v_proj"])
    return config


TARGETS = {"gpt2": ["c_attn"], "phi3": ["qkv_proj", "down_proj"]}
VARIANTS: dict[str, tuple[Callable[[str], ModelConfig], torch.dtype, bool]] = {
    "untied": (_plain, torch.float32, False),
    "tied": (partial(tiny_model, tie_word_embeddings=True), torch.float32, False),
    "lora": (_adapted, torch.float32, False),
    "packed": (_plain, torch.float32, True),
    "bf16": (_plain, torch.bfloat16, False),
}
"""The model, its number format, and whether documents are packed."""


def cases(archs: Sequence[str], variants: Sequence[str], stage_counts: Sequence[int]) -> Iterator[ParityCase]:
    """Yield every combination."""
    for arch in archs:
        for variant in variants:
            make, dtype, packed = VARIANTS[variant]
            for count in stage_counts:
                yield ParityCase(arch, variant, count, make(arch), dtype, _batch(packed), torch.tensor(40))


def _batch(packed: bool) -> Batch:
    """Return two sequences of 12 tokens; packed ones hold documents of 5 and 7."""
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :3] = -100
    positions = torch.cat([torch.arange(5), torch.arange(7)]) if packed else torch.arange(12)
    return {"input_ids": ids, "labels": labels, "position_ids": positions.repeat(2, 1)}
