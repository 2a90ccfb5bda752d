"""Small models and micro-batches for members of axis groups, who run them as threads, against one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.stages.tiny_models import VOCABULARY
from weft.conf.schema import ContextExchange, ModelConfig
from weft.engine.execution.batches import prepare_batch
from weft.engine.models.batch import Batch, count_label_tokens
from weft.engine.stages.checking.comparison import Outcome, whole_outcome
from weft.engine.stages.checking.members import members_outcome
from weft.engine.stages.checking.self_check import roughen
from weft.engine.stages.files.loading import build_model

CPU = torch.device("cpu")
FORMS = {"plain": {}, "packed": {"documents": (5, 8, 3)}, "padded": {"padding": 5}}
"""Arguments of `micro_batches` with 16 tokens."""


def micro_batches(count: int, *, rows=2, length=16, documents=(), padding=0) -> list[Batch]:
    """Random micro-batches; ``documents`` are the lengths of packed documents, ``padding`` that of the first row."""
    generator = torch.Generator().manual_seed(count)
    batches = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -100, ids)
        batch = {"input_ids": ids, "labels": labels}
        if documents:
            assert sum(documents) == length
            positions = torch.cat([torch.arange(size) for size in documents])
            batch["position_ids"] = positions.repeat(rows, 1)
            labels[:, torch.tensor(documents).cumsum(0)[:-1]] = -100
        if padding:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, -padding:] = 0
            labels[0, -padding:] = -100
        batches.append(prepare_batch(batch, CPU))
    return batches


def whole_model(config: ModelConfig):
    """A model in training mode whose weights are off their first values."""
    model = build_model(config, dtype=torch.float32, seed=1).train()
    roughen([model])
    return model


def items_of(batches: list[Batch]) -> Tensor:
    """Tokens with labels in all of them."""
    return torch.tensor(sum(map(count_label_tokens, batches)))


def shared(model, batches: list[Batch], exchange=ContextExchange.gather, **sizes: int) -> Outcome:
    """Return the outcome of micro-batches by members along the axes."""
    return members_outcome(model, batches, items_of(batches), sizes, exchange=exchange)


def require_exact(
    model,
    batches: list[Batch],
    exchange=ContextExchange.gather,
    *,
    change: Callable[[PreTrainedModel], object] = lambda model: None,
    **sizes: int,
) -> None:
    """Members compute what one process does, also after a ``change`` of the model that does not affect results."""
    want = whole_outcome(model, batches, items_of(batches))
    change(model)
    require_same(shared(model, batches, exchange, **sizes), want)


def recompute(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def require_same(got: Outcome, want: Outcome, tolerance=1e-5) -> None:
    """Losses, logits and every gradient, relative to its own largest value; what is zero may be as far off as 1e-8."""
    pairs = {"loss": (got.loss, want.loss), "logits": (got.logits, want.logits)}
    assert got.gradients.keys() == want.gradients.keys()
    pairs |= {name: (got.gradients[name], want.gradients[name]) for name in want.gradients}
    for name, (one, other) in pairs.items():
        assert one.shape == other.shape, name
        off, largest = float((one - other).detach().abs().max()), float(other.detach().abs().max())
        assert off <= tolerance * largest + 1e-8, f"{name}: off by {off:.2g}, the largest value is {largest:.2g}"
