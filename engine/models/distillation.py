"""Distillation: a loss of the student's logits against a teacher's most likely tokens (Hinton et al. 2015)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, pad

from weft.conf.schema import DistillConfig
from weft.engine.models.batch import Batch
from weft.engine.models.objective import Forward, Objective

IGNORED = -100
"""Label of a token that does not count."""
TEACHER = "teacher"
"""Name in a micro-batch of the teacher's most likely tokens at each token, fp32 [B, S, k, 2]: id, log-probability."""
LEAST = -1e4
"""Logarithm of a probability of 0, so that its product with the probability is 0, not NaN."""


class TopTokens(NamedTuple):
    """A teacher's most likely next tokens at each position.

    Attributes:
        log_probabilities: [tokens, k] in fp32, at temperature 1, normalised over the whole vocabulary.
        ids: [tokens, k], or None if they are all tokens, in order.
    """

    log_probabilities: Tensor
    ids: Tensor | None


def top_tokens(logits: Tensor, k: int, words: int | None = None) -> TopTokens:
    """Return the ``k`` most likely tokens by logits [tokens, V], or all of them if ``k`` is 0 or ``words`` or more.

    Args:
        words: number of tokens that the student has. Others only count in the sum of all probabilities.
    """
    logits = logits.float()
    own = logits[..., :words]
    if not 0 < k < own.shape[-1]:
        return TopTokens(log_softmax(own, -1), None)
    best, ids = own.topk(k, -1)
    return TopTokens(best - logits.logsumexp(-1, keepdim=True), ids)


def distillation_losses(
    logits: Tensor, labels: Tensor, teacher: TopTokens, settings: DistillConfig, *, chunk_bytes: float = inf
) -> Tensor:
    """Return the loss of each token, [tokens], for logits [tokens, V]. It is 0 for ignored labels.

    It is ``(1 - weight) * cross-entropy + weight * temperature ** 2 * KL(teacher || student)``. The divergence is over
    the teacher's k tokens and, with ``settings.tail``, one more outcome with the probability of all others. Both
    distributions over these outcomes are tempered and normalised again, so a teacher's log-probabilities at
    temperature 1 suffice for any temperature.

    The gradient of the logits is computed at once, in chunks of tokens. So a backward needs only it, in the type of the
    logits, instead of several tensors in fp32.

    Args:
        chunk_bytes: bytes of a chunk of logits in fp32.
    """
    loss = partial(_losses, settings=settings)
    rows = max(1, int(min(chunk_bytes / (torch.float32.itemsize * logits.shape[-1]), len(logits))))
    return _InChunks.apply(logits, labels, teacher.log_probabilities, teacher.ids, loss, rows)


class _InChunks(torch.autograd.Function):
    """The losses of logits, which computes their gradient with them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        log_probabilities: Tensor,
        ids: Tensor | None,
        loss: Callable[..., Tensor],
        rows: int,
    ) -> Tensor:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        losses, start = [], 0
        kept = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        while start < len(logits):
            part = slice(start, start := start + rows)
            teacher = TopTokens(log_probabilities[part], None if ids is None else ids[part])
            chunk = logits[part].detach().requires_grad_(gradient is not None)
            with torch.set_grad_enabled(gradient is not None), kept:  # hidden from hooks that count what a stage saves
                found = loss(chunk, labels[part], teacher)
                total = found.sum()
            if gradient is not None:
                (gradient[part],) = torch.autograd.grad(total, chunk)
                del chunk, total  # before the next chunk is allocated
            losses.append(found.detach())
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * above.unsqueeze(-1).to(gradient.dtype), None, None, None, None, None


def _losses(logits: Tensor, labels: Tensor, teacher: TopTokens, settings: DistillConfig) -> Tensor:
    counts, wanted = labels != IGNORED, teacher.log_probabilities
    own = labels.clamp(min=0).unsqueeze(-1)
    logits = logits.float()
    if teacher.ids is None:
        outcomes, student = (logits, logits)
        label = logits.gather(-1, own)
        wanted = pad(wanted, (0, logits.shape[-1] - wanted.shape[-1]), value=LEAST)  # rows without a token
    else:
        picked = logits.gather(-1, torch.cat([teacher.ids, own], -1))
        student, label = picked[:, :-1], picked[:, -1:]
        others = logits.scatter(-1, teacher.ids, -torch.inf).logsumexp(-1, keepdim=True)
        outcomes = torch.cat([student, others], -1)
        if settings.tail:
            student, wanted = outcomes, torch.cat([wanted, _log_rest(wanted)], -1)
    losses = (1 - settings.weight) * (outcomes.logsumexp(-1, keepdim=True) - label).squeeze(-1)
    wanted = wanted.clamp(min=LEAST).masked_fill(~counts.unsqueeze(-1), 0.0)
    found, wanted = (log_softmax(each / settings.temperature, -1) for each in (student, wanted))
    divergence = kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    return (losses + settings.weight * settings.temperature**2 * divergence).masked_fill(~counts, 0.0)


def _log_rest(log_probabilities: Tensor) -> Tensor:
    """Return the logarithm [tokens, 1] of the probability that is left of 1."""
    mass = log_probabilities.exp().sum(-1, keepdim=True)
    return torch.log1p(-mass.clamp(max=1 - torch.finfo(mass.dtype).eps))


def distillation(score: Callable[[Batch], TopTokens], settings: DistillConfig, chunk_bytes: float = inf) -> Objective:
    """Return the objective of distillation. A micro-batch may have the teacher's tokens already, under `TEACHER`.

    Args:
        score: returns the teacher's most likely tokens after each token of a micro-batch, [B x S, k].
    """

    def loss(forward: Forward, batch: Batch, num_items: Tensor) -> Tensor:
        # The teacher is first, because its logits are freed before the student's exist.
        teacher = _arrived(batch[TEACHER]) if TEACHER in batch else score(batch)
        logits = forward().logits
        labels = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        rows = logits.flatten(0, -2), labels.flatten()
        return distillation_losses(*rows, teacher, settings, chunk_bytes=chunk_bytes).sum() / num_items

    return Objective(loss)


def of_tokens(following: TopTokens, batch: Batch) -> Tensor:
    """Return the scores [B, S, k, 2] of a micro-batch's tokens, by those of the tokens after each token."""
    assert following.ids is not None
    pairs = torch.stack([following.ids.float(), following.log_probabilities], -1)
    return pad(pairs.unflatten(0, batch["input_ids"].shape)[:, :-1], (0, 0, 0, 0, 1, 0))


def _arrived(scores: Tensor) -> TopTokens:
    """Return the tokens after each token, by scores [B, S, k, 2] of the tokens themselves."""
    following = pad(scores[:, 1:], (0, 0, 0, 0, 0, 1)).flatten(0, 1)
    return TopTokens(following[..., 1], following[..., 0].long())
