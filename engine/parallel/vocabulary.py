"""Embedding, head and loss with the vocabulary divided over a tensor group."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.parallel import functions
from weft.engine.parallel.axis import AxisGroup

_ABSENT = "_weft_absent"


def _enter(first: int, held: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Map token ids to indices in this member's part of the vocabulary: ``held`` tokens from ``first`` on.

    Tokens of other members get index 0 and are marked for `_leave`.
    """
    local = args[0] - first
    absent = (local < 0) | (local >= held)
    local = local.masked_fill(absent, 0)
    setattr(local, _ABSENT, absent)
    return (local, *args[1:])


def _leave(group: AxisGroup, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add the other members' vectors for their tokens, and return the embedding vectors [B, S, H] of all."""
    absent = getattr(args[0], _ABSENT)
    return functions.all_sum(group, output.masked_fill(absent.unsqueeze(-1), 0.0))


def cut_embedding(group: AxisGroup, module: nn.Embedding) -> None:
    """Hook an embedding that has only this member's part of the vocabulary."""
    held = module.weight.shape[0]
    if module.padding_idx is not None:
        local = module.padding_idx - group.index * held
        module.padding_idx = local if 0 <= local < held else None
    module.num_embeddings = held
    module.register_forward_pre_hook(partial(_enter, group.index * held, held))
    module.register_forward_hook(partial(_leave, group))


class VocabularyLoss:
    """Hugging Face's loss of a causal model, from logits over this member's part of the vocabulary.

    Only two numbers per token are summed over members. Logits over the whole vocabulary are never gathered.
    """

    def __init__(self, group: AxisGroup) -> None:
        self._group = group

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the same loss as `transformers.loss.loss_utils.ForCausalLMLoss`.

        Args:
            logits: this member's logits, [B, S, V / members].
            labels: [B, S], not shifted.
            num_items_in_batch: divisor of the sum over tokens. None divides by the number of tokens with a label.
            shift_labels: [B, S], shifted, instead of ``labels``.
        """
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        wanted = shift_labels.reshape(-1).to(logits.device)
        if hasattr(logits, "token_losses"):  # lazy logits, see `weft.engine.models.lazy_logits`
            each = logits.token_losses(wanted, ignore_index)
        else:
            each = _CrossEntropy.apply(logits.flatten(0, -2), wanted, self._group)
        counts = wanted != ignore_index
        total = each.masked_fill(~counts, 0.0).sum()
        if num_items_in_batch is None:
            return total / counts.sum()
        return total / torch.as_tensor(num_items_in_batch, device=total.device)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token. The incoming gradient must be the same on all members."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, group: AxisGroup) -> Tensor:
        held = logits.shape[-1]
        scores = logits.float()
        largest = group.maximum(scores.amax(-1)).wait()
        scores = scores - largest.unsqueeze(-1)
        local = wanted - group.index * held
        absent = (local < 0) | (local >= held)
        local = local.masked_fill(absent, 0).unsqueeze(-1)
        own = scores.gather(-1, local).squeeze(-1).masked_fill(absent, 0.0)
        likely = scores.exp_()
        both = group.all_reduce(torch.stack([likely.sum(-1), own])).wait()
        ctx.save_for_backward(likely.div_(both[0].unsqueeze(-1)), local, absent)
        ctx.dtype = logits.dtype
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        likely, local, absent = ctx.saved_tensors
        gradient = likely.scatter_add(-1, local, absent.float().sub(1.0).unsqueeze(-1))
        return gradient.mul_(gradients[0].unsqueeze(-1)).to(ctx.dtype), None, None
