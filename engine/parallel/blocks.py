"""Attention of some queries to one block of keys: its output, and the log-sum-exp by which blocks are merged.

Each implementation is a pair of functions. Backwards take output and log-sum-exp over *all* keys that the queries
attend to, and return the gradients that this block contributes. The fused implementations are torch's internal
operators, because `scaled_dot_product_attention` does not return the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
FLASH_WIDTH = 256
"""Largest head size that torch's flash attention supports on a GPU."""
_ALIGNED, _ALIGNED_SUMS = 16, 32
"""Multiples to which biases and log-sum-exps are padded for memory-efficient attention, in elements."""

Gradients = tuple[Tensor, Tensor, Tensor]


class Block(NamedTuple):
    """Some queries and the keys and values of one block.

    Attributes:
        query: the queries, [B, heads, Q, D].
        key: the keys, [B, key and value heads, K, D].
        value: the values, [B, key and value heads, K, Dv].
        scale: factor of the scores.
        causal: whether a query attends only to keys up to its own index, in which case Q equals K.
        bias: [B or 1, 1, Q, K] in the query's dtype, added to the scaled scores. See `unseen`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False
    bias: Tensor | None = None

    @property
    def shared_by(self) -> int:
        """Number of query heads that use each key and value head."""
        return self.query.shape[1] // self.key.shape[1]


class Partial(NamedTuple):
    """Result of attention to one block.

    Attributes:
        output: [B, heads, Q, Dv], normalised over this block's keys.
        sums: [B, heads, Q], the log-sum-exp of the scores, in fp32 or better.
        seeds: random state for the implementation's backward, without meaning unless there is dropout.
    """

    output: Tensor
    sums: Tensor
    seeds: tuple[Tensor, ...] = ()


class Kernel(Protocol):
    """An implementation of attention to one block."""

    def forward(self, block: Block) -> Partial:
        """Compute attention of the queries to the block's keys."""
        ...

    def backward(
        self, block: Block, gradient: Tensor, output: Tensor, sums: Tensor, seeds: tuple[Tensor, ...]
    ) -> Gradients:
        """Return gradients of the block's query, key and value.

        Args:
            output, sums: results over all keys that the queries attend to, not only this block's keys.
            seeds: `Partial.seeds` from the same implementation's forward.
        """
        ...


def unseen(dtype: torch.dtype) -> float:
    """Return the score of a masked key: so low that its weight is zero next to any other key.

    It is finite, so that a fully masked row has a finite log-sum-exp, with which its weight in the merge is zero. It
    is not the lowest number, because implementations multiply scores before they subtract the maximum.
    """
    return torch.finfo(dtype).min / 4


def kernel_for(query: Tensor, *, masked: bool) -> Kernel:
    """Return the fastest implementation for queries of this shape, type and device.

    Args:
        masked: whether blocks have biases.
    """
    if query.device.type == "cpu" and query.is_floating_point():
        return ProcessorFlash()
    if query.device.type == "cuda" and query.dtype is not torch.float64:
        half = query.dtype in (torch.float16, torch.bfloat16)
        modern = torch.cuda.get_device_capability(query.device) >= (8, 0)
        if half and modern and not masked and query.shape[-1] <= FLASH_WIDTH:
            return GpuFlash()
        return GpuEfficient()
    return Plain()


@dataclass(frozen=True)
class Plain:
    """Reference implementation for any device, which stores all scores."""

    def forward(self, block: Block) -> Partial:
        """See `Kernel`."""
        scores = self._scores(block)
        sums = scores.logsumexp(-1)
        weights = (scores - sums.unsqueeze(-1)).exp()
        return Partial((weights @ _repeated(block.value, block).to(weights.dtype)).to(block.query.dtype), sums)

    def backward(
        self, block: Block, gradient: Tensor, output: Tensor, sums: Tensor, seeds: tuple[Tensor, ...]
    ) -> Gradients:
        """See `Kernel`."""
        weights = (self._scores(block) - sums.unsqueeze(-1)).exp()
        wide = weights.dtype
        gradient, output, query = gradient.to(wide), output.to(wide), block.query.to(wide)
        key, value = (_repeated(part, block).to(wide) for part in (block.key, block.value))
        of_weights = gradient @ value.mT - (gradient * output).sum(-1, keepdim=True)
        of_scores = weights * of_weights * block.scale
        return (
            (of_scores @ key).to(block.query.dtype),
            _added(of_scores.mT @ query, block).to(block.key.dtype),
            _added(weights.mT @ gradient, block).to(block.value.dtype),
        )

    def _scores(self, block: Block) -> Tensor:
        wide = torch.promote_types(block.query.dtype, torch.float32)
        scores = block.query.to(wide) @ _repeated(block.key, block).to(wide).mT * block.scale
        if block.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, unseen(wide))
        return scores if block.bias is None else scores + block.bias.to(wide)


@dataclass(frozen=True)
class ProcessorFlash:
    """Implementation with torch's flash attention on CPUs."""

    def forward(self, block: Block) -> Partial:
        """See `Kernel`."""
        even = _of_one_width(block)
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            even.query, even.key, even.value, 0.0, even.causal, attn_mask=even.bias, scale=even.scale
        )
        return Partial(output[..., : block.value.shape[-1]], sums)

    def backward(
        self, block: Block, gradient: Tensor, output: Tensor, sums: Tensor, seeds: tuple[Tensor, ...]
    ) -> Gradients:
        """See `Kernel`."""
        even = _of_one_width(block)
        gradient, output = (_widened(part, even.value.shape[-1]) for part in (gradient, output))
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient, even.query, even.key, even.value, output, sums, 0.0, even.causal),
            attn_mask=even.bias,
            scale=even.scale,
        )
        return _narrowed(found, block)


@dataclass(frozen=True)
class GpuFlash:
    """Implementation with torch's flash attention on GPUs, which does not support biases."""

    def forward(self, block: Block) -> Partial:
        """See `Kernel`."""
        even = _of_one_width(block, multiple=8)
        output, sums, _, _, _, _, *seeds, _ = aten._scaled_dot_product_flash_attention(
            even.query, even.key, even.value, 0.0, even.causal, scale=even.scale
        )
        return Partial(output[..., : block.value.shape[-1]], sums[..., : block.query.shape[2]], tuple(seeds))

    def backward(
        self, block: Block, gradient: Tensor, output: Tensor, sums: Tensor, seeds: tuple[Tensor, ...]
    ) -> Gradients:
        """See `Kernel`."""
        even = _of_one_width(block, multiple=8)
        gradient, output = (_widened(part, even.value.shape[-1]) for part in (gradient, output))
        lengths = even.query.shape[2], even.key.shape[2]
        found = aten._scaled_dot_product_flash_attention_backward(
            *(gradient, even.query, even.key, even.value, output, sums.contiguous()),
            *(None, None, *lengths, 0.0, even.causal, *seeds),
            scale=even.scale,
        )
        return _narrowed(found, block)


@dataclass(frozen=True)
class GpuEfficient:
    """Implementation with torch's memory-efficient attention on GPUs, which supports biases and fp32."""

    def forward(self, block: Block) -> Partial:
        """See `Kernel`."""
        output, sums, *seeds = aten._scaled_dot_product_efficient_attention(
            *self._given(block), True, 0.0, block.causal, scale=block.scale
        )
        return Partial(output[..., : block.value.shape[-1]], sums[..., : block.query.shape[2]], tuple(seeds))

    def backward(
        self, block: Block, gradient: Tensor, output: Tensor, sums: Tensor, seeds: tuple[Tensor, ...]
    ) -> Gradients:
        """See `Kernel`."""
        given = self._given(block)
        gradient, output = (_widened(part, given[2].shape[-1]) for part in (gradient, output))
        sums = pad(sums, (0, -sums.shape[-1] % _ALIGNED_SUMS), value=torch.inf).contiguous()
        of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            *(gradient, *given, output, sums, *seeds, 0.0, [True, True, True, False], block.causal), scale=block.scale
        )
        return _narrowed((of_query, _added(of_key, block), _added(of_value, block)), block)

    def _given(self, block: Block) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        bias = block.bias
        if bias is not None:
            bias = pad(bias, (0, -bias.shape[-1] % _ALIGNED))[..., : bias.shape[-1]]
            bias = bias.expand(*block.query.shape[:2], *bias.shape[2:])
        query, key, value = _of_one_width(block, multiple=8)[:3]
        return query, _repeated(key, block), _repeated(value, block), bias


def _repeated(part: Tensor, block: Block) -> Tensor:
    """Repeat key or value heads, so that each query head has its own."""
    return part if block.shared_by == 1 else part.repeat_interleave(block.shared_by, 1)


def _added(gradient: Tensor, block: Block) -> Tensor:
    """Sum the gradients over the query heads that share a key and value head."""
    return gradient if block.shared_by == 1 else gradient.unflatten(1, (-1, block.shared_by)).sum(2)


def _of_one_width(block: Block, multiple: int = 1) -> Block:
    """Pad queries, keys and values with zeros to the same head size, a multiple of ``multiple``."""
    width = max(block.query.shape[-1], block.value.shape[-1])
    width += -width % multiple
    query, key, value = (_widened(part, width) for part in block[:3])
    return block._replace(query=query, key=key, value=value)


def _widened(part: Tensor, width: int) -> Tensor:
    return part if part.shape[-1] == width else pad(part, (0, width - part.shape[-1]))


def _narrowed(gradients: Gradients, block: Block) -> Gradients:
    one, other, third = gradients
    widths = [part.shape[-1] for part in block[:3]]
    return one[..., : widths[0]], other[..., : widths[1]], third[..., : widths[2]]
