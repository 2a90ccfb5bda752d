"""Losses of one's own, their training by one process of plain Hugging Face, and by Weft."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine import tiny
from tests.engine.tiny import batches, check_order, tiny_config
from weft.conf.schema import WeftConfig
from weft.engine.models.objective import Objective

STEPS = 3


def smoothed(outputs: Any, batch: Any, num_items: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels, over label tokens."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
    return cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum") / num_items


def preferred(outputs: Any, batch: Any) -> Tensor:
    """Rows come in pairs: the first is to be likelier than the second, measured from a reference; a mean."""
    labels = batch["labels"][:, 1:]
    each = log_softmax(outputs.logits[:, :-1].float(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    ratio = (each * (labels != -100)).sum(-1) - batch["reference"]
    return -logsigmoid(0.1 * (ratio[0::2] - ratio[1::2])).mean()


def own(forward: Any, batch: Any, num_items: Tensor) -> Tensor:
    """The model's own loss, asked of its forward, as `Trainer.compute_loss` does."""
    return forward(labels=batch["labels"], num_items_in_batch=num_items).loss


OBJECTIVES = {
    "smoothed": Objective.of(smoothed),
    "preferred": Objective.mean(preferred),
    "own": Objective(own),
    "router": None,
}
AUXILIARY = 0.5


def routed_config(config: WeftConfig) -> WeftConfig:
    """The same with a mixture of experts and its auxiliary loss."""
    config.model.arch = "mixtral"
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": AUXILIARY}
    config.model.overrides = config.model.overrides | experts
    return config


def routed(model: Any, batch: Any, num_items: Tensor) -> Tensor:
    """Hugging Face's own loss, its auxiliary part by the micro-batch's share of the label tokens."""
    ids, labels = batch["input_ids"], batch["labels"]
    outputs = model(input_ids=ids, labels=labels, num_items_in_batch=num_items, use_cache=False)
    share = (labels[:, 1:] != -100).sum() / num_items
    return outputs.loss - AUXILIARY * outputs.aux_loss * (1 - share)


def paired(replica: int, num_replicas: int) -> Iterator[dict[str, Tensor]]:
    """The tiny batches with a reference for each row."""
    for batch in batches(replica, num_replicas):
        yield batch | {"reference": -0.5 * batch["input_ids"].float().mean(-1)}


def reference_losses(name: str, config: WeftConfig, num_replicas: int) -> list[float]:
    """One process that runs Hugging Face's own forward on the same data."""
    return tiny.reference_losses(config, num_replicas, STEPS, loss_of=partial(_reference, name), data=paired)


def _reference(name: str, model: Any, batch: Any, items: Tensor, count: int) -> Tensor:
    items = items.float()
    if name == "router":
        return routed(model, batch, items)
    if name == "own":
        return own(partial(model, input_ids=batch["input_ids"], use_cache=False), batch, items)
    outputs = model(input_ids=batch["input_ids"], use_cache=False)
    return smoothed(outputs, batch, items) if name == "smoothed" else preferred(outputs, batch) / count


def weft_losses(cases: list[tuple[str, WeftConfig]]) -> list[list[float]]:
    """Losses of this rank's engine, of each case."""
    from weft.engine.initialize import initialize

    found = []
    for name, config in cases:
        engine, *_ = initialize(config=config, loss=OBJECTIVES[name])
        engine.set_dataiterator(paired(engine.replica, engine.num_replicas))
        found.append([float(engine.train_batch()) for _ in range(STEPS)])
        check_order(engine)
        engine.destroy()
    return found


def undivided_loss(config: WeftConfig) -> str:
    """Return the error for a loss that is an undeclared mean."""
    from weft.engine.initialize import initialize

    engine, *_ = initialize(config=config, loss=lambda outputs, batch, num_items: preferred(outputs, batch))
    engine.set_dataiterator(paired(engine.replica, engine.num_replicas))
    try:
        engine.train_batch()
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing"


def frozen_losses(count: int) -> list[float]:
    """Losses of a model whose first layers a caller has frozen, by an optimiser that the caller makes."""
    from weft.engine.initialize import initialize

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**tiny_config(layers=4).model.overrides))
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    config = tiny_config(layers=4, stages=count)
    engine, *_ = initialize(model=model, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3), config=config)
    engine.set_dataiterator(itertools.islice(batches(0, 1), 8))
    losses = [float(engine.train_batch()) for _ in range(2)]
    engine.destroy()
    return losses
