"""Distillation by one process of plain Hugging Face, and by Weft."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.engine import tiny
from tests.engine.tiny import begun
from weft.conf.schema import DistillConfig, WeftConfig

STEPS = 20
ROWS = tiny.VOCAB + 6
"""Rows of the teacher's head, of which some have no token."""


def save_teacher(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Save a teacher with sharp distributions, and return its folder."""
    torch.manual_seed(7)
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=ROWS, num_key_value_heads=2, max_position_embeddings=64, **shape))
    model.lm_head.weight.data.mul_(20)
    model.to(dtype).save_pretrained(folder)
    return str(folder)


def distilled(config: WeftConfig, **settings: Any) -> WeftConfig:
    """The same with distillation."""
    return replace(config, distill=DistillConfig(enabled=True, **settings))


def plain_loss(settings: DistillConfig, teacher: Any, model: Any, batch: Any, items: Tensor, count: int) -> Tensor:
    """Return the loss of a micro-batch by probabilities, as the definition of the setting is read."""
    student = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
    with torch.no_grad():
        logits = teacher(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
    labels, temperature = batch["labels"][:, 1:], settings.temperature
    nll = cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    p, q = softmax(logits, -1), softmax(student, -1)
    own = p[..., : q.shape[-1]]
    if not settings.top_k:
        p = own
    else:
        ids = own.topk(settings.top_k, -1).indices
        (p, p_rest), (q, q_rest) = ((each.gather(-1, ids), each.scatter(-1, ids, 0.0).sum(-1, True)) for each in (p, q))
        if settings.tail:
            p, q = torch.cat([p, p_rest], -1), torch.cat([q, q_rest], -1)
    p, q = (each ** (1 / temperature) for each in (p, q))
    p, q = (each / each.sum(-1, keepdim=True) for each in (p, q))
    divergence = temperature**2 * (p * (p / q).log()).sum(-1)
    mixed = (1 - settings.weight) * nll + settings.weight * divergence
    return mixed[labels != -100].sum() / items


def reference_losses(config: WeftConfig, replicas: int) -> list[float]:
    """Losses of a plain loop."""
    teacher = AutoModelForCausalLM.from_pretrained(config.distill.teacher).eval()
    return tiny.reference_losses(config, replicas, STEPS, loss_of=partial(plain_loss, config.distill, teacher))


def weft_losses(cases: list[WeftConfig]) -> list[list[float]]:
    """Losses of this rank's engine, of each case."""
    found = []
    for config in cases:
        engine = begun(config)
        found.append([float(engine.train_batch()) for _ in range(STEPS)])
        engine.destroy()
    return found
