"""Cross-entropy of a linear head, in chunks, as a product of the split backward: logits never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.engine.backward.products import ComputedProduct
from weft.engine.parallel.axis import AxisGroup, gather

Step = Callable[[Tensor], Tensor]
"""An elementwise function that a model applies to its logits."""


@dataclass(kw_only=True, eq=False)
class HeadLoss(ComputedProduct):
    """The cross-entropy of each token from hidden states [..., H] and a head's weight [V, H].

    The forward computes the logits in chunks of tokens. It keeps their normalisers, and the gradient of the hidden
    states while a chunk's probabilities exist, because this saves the input backward a product over the vocabulary.
    The weight's gradient computes the logits again, in chunks of the vocabulary, so no sums over chunks are rounded.

    Attributes:
        weight, bias: the head's parameters, of this member's part of the vocabulary.
        labels: index of each token's label in the vocabulary, [tokens].
        ignore_index: label of tokens without a loss.
        steps: what the model does with its logits before the loss.
        chunk_bytes: bytes of a chunk of logits in fp32.
        group: ranks that share the vocabulary.
        differentiable: whether a backward may follow.
        complete: returns the context in which the weight is complete after the forward.
    """

    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    ignore_index: int
    steps: tuple[Step, ...]
    chunk_bytes: float
    group: AxisGroup
    differentiable: bool
    complete: Callable[[], AbstractContextManager[None]]

    def __post_init__(self) -> None:
        self._ignored = self.labels == self.ignore_index
        self._local = self.labels - self.group.index * len(self.weight)
        self._below: Tensor | None = None
        if not self.labels.is_meta:
            valid = (self.labels >= 0) & (self.labels < self.group.size * len(self.weight))
            torch._assert_async((valid | self._ignored).all(), "a label is not in the vocabulary of the model's head")

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The factors that wait."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def forward(self, activation: Tensor) -> Tensor:
        """Return the loss of each token, [tokens] in fp32. It is 0 for ignored tokens."""
        rows, weight, bias = activation.detach().flatten(0, -2), self.weight.detach(), _detached(self.bias)
        losses = rows.new_empty(len(rows), dtype=torch.float32)
        normalisers = torch.empty_like(losses)
        below = torch.empty_like(rows) if self.differentiable and activation.requires_grad else None
        for part in self._chunks(len(rows), len(weight)):
            scores, pull = self._scores(rows[part], weight, bias)
            labels, own = self._labels(part, 0, len(weight))
            largest = scores.amax(-1)
            scores.sub_(largest.unsqueeze(-1))
            wanted = scores.gather(-1, labels).squeeze(-1).add_(largest).masked_fill_(~own, 0.0)
            sums = scores.exp_().sum(-1)
            normaliser, wanted = self._over_members(sums.log().add_(largest), wanted)
            losses[part], normalisers[part] = normaliser - wanted, normaliser
            if below is not None:
                scores.mul_(torch.exp(largest - normaliser).unsqueeze(-1))
                scores.scatter_add_(-1, labels, -own.float().unsqueeze(-1))
                torch.mm(pull(scores), weight, out=below[part])
            del scores, pull  # before the next chunk is allocated
        below = None if below is None else below.view(activation.shape)
        self._below, self._normalisers = below, normalisers
        self.saved = (normalisers,) if below is None else (normalisers, below)
        return losses.masked_fill_(self._ignored, 0.0)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Map [tokens] to the gradient of the hidden states, [..., H]."""
        below, self._below, self.saved = self._below, None, ()
        assert below is not None, "the input gradient has been computed"
        below.flatten(0, -2).mul_(self._factors(gradient).unsqueeze(-1))
        return below

    def parameter_gradients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of weight and bias, from logits that are computed again."""
        rows, factors = activation.flatten(0, -2), self._factors(gradient).unsqueeze(-1)
        with self.complete():
            weight, bias = self.weight.detach(), _detached(self.bias)
            found = [torch.empty_like(parameter) for parameter in self.parameters]
            for part in self._chunks(len(weight), len(rows)):
                scores, pull = self._scores(rows, weight[part], None if bias is None else bias[part])
                labels, own = self._labels(slice(None), part.start, part.stop)
                scores.sub_(self._normalisers.unsqueeze(-1)).exp_()
                scores.scatter_add_(-1, labels, -own.float().unsqueeze(-1))
                of_logits = pull(scores.mul_(factors))
                torch.mm(of_logits.t(), rows, out=found[0][part])
                if bias is not None:
                    torch.sum(of_logits, 0, out=found[1][part])
                del scores, pull, of_logits  # before the next chunk is allocated
        return tuple(found)

    def _chunks(self, count: int, width: int) -> Iterator[slice]:
        """Yield slices of ``count`` rows or columns of logits that have ``width`` elements each."""
        size = max(1, int(self.chunk_bytes // (torch.float32.itemsize * max(1, width))))
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))

    def _scores(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Step]:
        """Return logits in fp32, which may be overwritten, and a function from their gradient to the head's."""
        raw = nn.functional.linear(rows, weight, bias)
        if not self.steps:
            dtype = raw.dtype  # the result itself is freed
            return raw.float(), lambda gradient: gradient.to(dtype)
        kept = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.enable_grad(), kept:  # hidden from hooks that count what a stage saves
            scores = raw.requires_grad_()
            for step in self.steps:
                scores = step(scores)
        return scores.detach().to(torch.float32, copy=True), lambda gradient: torch.autograd.grad(
            scores, raw, gradient.to(scores.dtype)
        )[0]

    def _labels(self, rows: slice, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return labels [tokens, 1] as indices from ``first``, and whether each is before ``end`` and counts."""
        labels = self._local[rows]
        own = (labels >= first) & (labels < end) & ~self._ignored[rows]
        return (labels - first).masked_fill_(~own, 0).unsqueeze(-1), own

    def _over_members(self, normaliser: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalisers and wanted logits over the whole vocabulary."""
        if self.group.size == 1:
            return normaliser, wanted
        both = gather(self.group, torch.stack([normaliser, wanted]).unsqueeze(0), 0)
        return both[:, 0].logsumexp(0), both[:, 1].sum(0)

    def _factors(self, gradient: Tensor) -> Tensor:
        return gradient.float().masked_fill(self._ignored, 0.0)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
