"""The middle one of three Llama blocks, as Weft builds and runs it in a virtual stage, with several kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.blocks.clock import Passes
from weft.conf.schema import Attention, ClusterConfig, Float8, Kernels, ModelConfig, Precision, TrainConfig, WeftConfig
from weft.engine.backward import SplitBackward
from weft.engine.execution.batches import prepare_batch
from weft.engine.models.float8 import use_float8
from weft.engine.models.kernels import fuse
from weft.engine.models.tracing import trace_model
from weft.engine.precision import DTYPES
from weft.engine.stages.cutting.split import StageSplit
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.loading import load_hf_config, load_stages
from weft.tools.preflight import check_device

PRECISION = Precision.bf16
DTYPE = DTYPES[PRECISION]
_MIDDLE, _BLOCKS, _IDS = 1, 3, 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a Llama's block, and the number of words for the loss."""

    width: int
    inner: int
    heads: int
    groups: int
    words: int

    def model(self, tokens: int) -> ModelConfig:
        """Return a model of three blocks. Embedding and head are not measured, and small."""
        overrides = {
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "num_hidden_layers": _BLOCKS,
            "vocab_size": _IDS,
            "max_position_embeddings": tokens,
        }
        return ModelConfig(arch="llama", overrides=overrides)

    def flops(self, tokens: int) -> float:
        """Return the operations of a block's forward and backward for one sequence, as in the definition of MFU."""
        traced = trace_model(load_hf_config(self.model(tokens)), tokens, dtype=DTYPE)
        return 3 * traced.layers[_MIDDLE].forward_flops


LLAMA_8B = Shape(width=4096, inner=14336, heads=32, groups=8, words=128_256)
TINY = Shape(width=64, inner=224, heads=4, groups=2, words=512)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The kernels of a block.

    Attributes:
        compiled: whether torch.compile compiles the block, which Weft does not do.
        split: whether the backward runs in two parts, as zero-bubble schedules need it.
    """

    attention: Attention = Attention.sdpa
    kernels: Kernels = Kernels.none
    float8: Float8 = Float8.none
    compiled: bool = False
    split: bool = False

    def check(self, device: torch.device) -> None:
        """Check that this machine runs it. Raise ValueError if it does not."""
        model = ModelConfig(attn_implementation=self.attention, kernels=self.kernels, float8=self.float8)
        train = TrainConfig(precision=PRECISION)
        check_device(WeftConfig(model=model, cluster=ClusterConfig(ranks=1), train=train))
        if self.compiled and device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
            raise ValueError("torch.compile: this torch is built for CPUs, so it compiles nothing for a GPU")


FUSED, COMPILED = Variant(kernels=Kernels.fused), Variant(compiled=True)
VARIANTS = {
    "plain": Variant(),
    "fused": FUSED,
    "fused, varlen": replace(FUSED, attention=Attention.varlen),
    "fused, flash_attention_3": replace(FUSED, attention=Attention.flash_attention_3),
    "fused, split": replace(FUSED, split=True),
    **{f"fused, fp8 {recipe.value}": replace(FUSED, float8=recipe) for recipe in Float8 if recipe is not Float8.none},
    "varlen": Variant(attention=Attention.varlen),
    "compiled": COMPILED,
    "flash_attention_2": Variant(attention=Attention.flash_attention_2),
    "flash_attention_3": Variant(attention=Attention.flash_attention_3),
    "flash_attention_4": Variant(attention=Attention.flash_attention_4),
    "flex_attention": Variant(attention=Attention.flex_attention),
    "split": Variant(split=True),
}
"""In order of value. The first is Hugging Face's block as it is."""


class Block:
    """A block's stage. Its weights are the same for each number of tokens and each variant."""

    def __init__(self, shape: Shape, tokens: int, device: torch.device) -> None:
        """Make the stage, for sequences of at most so many tokens."""
        split = StageSplit((1,) * _BLOCKS)
        (self.stage,) = load_stages(shape.model(tokens), split, [_MIDDLE], dtype=DTYPE, seed=0)
        self.stage.to(device)
        self._device = device

    @contextmanager
    def passes(self, variant: Variant, tokens: int) -> Iterator[Passes]:
        """Context with the passes of a variant over a sequence of ``tokens`` tokens, whose inputs are always equal."""
        torch.manual_seed(0)
        ids = torch.randint(_IDS, (1, tokens))
        batch = prepare_batch({"input_ids": ids, "labels": ids}, self._device)
        shape, dtype = self.stage.hidden_spec(batch)
        hidden, gradient = (torch.randn(shape, device=self._device, dtype=DTYPE).to(dtype) for _ in range(2))
        self._apply(variant)
        backwards = None if variant.compiled else SplitBackward(self.stage)
        try:
            yield _passes(self.stage, backwards, hidden.requires_grad_(), batch, gradient, split=variant.split)
        finally:
            if backwards is not None:
                backwards.remove()
            torch.compiler.reset()
            for module in self.stage.modules():
                vars(module).pop("forward", None)

    def _apply(self, variant: Variant) -> None:
        model = self.stage.hf_model
        model.set_attn_implementation(variant.attention.value)
        if variant.kernels is Kernels.fused:
            fuse(model, self._device)
        if variant.float8 is not Float8.none:
            use_float8(model, variant.float8, self._device)
        if variant.compiled:
            (block,) = self.stage.blocks()
            block.forward = torch.compile(block.forward, dynamic=False)


def _passes(
    stage: Stage,
    backwards: SplitBackward | None,
    hidden: Tensor,
    batch: dict[str, Tensor],
    gradient: Tensor,
    *,
    split: bool,
) -> Passes:
    """Return the passes of a stage. Without ``backwards``, whose hooks torch.compile does not compile, plain autograd.

    ``split`` is whether the backward runs in two parts.
    """
    parameters = dict(stage.named_global_parameters())

    def prepare() -> None:
        for leaf in (hidden, *parameters.values()):
            leaf.grad = None

    def forward(_: None) -> Any:
        if backwards is None:
            return stage(hidden, batch), None
        return backwards.forward(lambda: stage(hidden, batch), hidden, split=split)

    def backward(passed: Any) -> dict[str, Tensor]:
        output, saved = passed
        if backwards is None:
            output.backward(gradient)
        else:
            backwards.full_backward(saved, gradient)  # I, then W
        leaves = {"input": hidden, **parameters}
        return {"output": output} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    return Passes(prepare, forward, backward)
