"""Direct preference optimisation (Rafailov et al. 2023), on pairs of which the first half of the rows are chosen."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, pad

from weft.engine.models.batch import Batch
from weft.engine.models.objective import Forward, Objective

REFERENCE = "reference"
"""Name in a micro-batch of the reference's log-probabilities of its labels, [B, S]."""


def label_log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """Return the log-probability [B, S] of each label, given the tokens before it. Without a label it is 0."""
    targets = batch["labels"][:, 1:]
    losses = cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none")
    return pad(-losses.view(targets.shape), (1, 0))


def count_pairs(batch: Batch) -> int:
    """Return the number of pairs in a micro-batch, without those that only fill it up."""
    return int(_are_pairs(batch).sum())


def _are_pairs(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != -100).any(-1).chunk(2)[0]


def preference_objective(beta: float, label_smoothing: float = 0.0) -> Objective:
    """Return the loss of equation 7 of the paper, averaged over pairs.

    Args:
        label_smoothing: probability with which a pair's answers are taken to be swapped (Mitchell 2023).
    """

    def loss(forward: Forward, batch: Batch, num_items: Tensor) -> Tensor:
        ratios = (label_log_probs(forward().logits, batch) - batch[REFERENCE]).sum(-1)
        chosen, rejected = ratios.chunk(2)
        margin = beta * (chosen - rejected)
        losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
        return torch.where(_are_pairs(batch), losses, 0.0).sum() / num_items

    return Objective(loss, count_pairs)
