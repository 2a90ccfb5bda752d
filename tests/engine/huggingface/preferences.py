"""The example of preference training, run on ranks and by hand."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from tests.engine.huggingface.runs import VOCAB, arguments, section, tiny_model

PAIRS, ACCUMULATED, STEPS = 2, 2, 3
"""Pairs of a micro-batch, micro-batches of a step over all replicas, and steps."""
RATE = 1e-3


@cache
def example() -> Any:
    """The script as a module."""
    path = Path(__file__).parents[3] / "examples" / "dpo.py"
    spec = importlib.util.spec_from_file_location("dpo_example", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["dpo_example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pairs() -> list[dict[str, Any]]:
    """Prompts with two answers each, all of uneven length, and what a reference says of the answers."""
    generator = torch.Generator().manual_seed(0)

    def some(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most, (1,), generator=generator))
        return torch.randint(1, VOCAB, (count,), generator=generator).tolist()

    rows = [
        {"prompt_ids": some(2, 6), "chosen_ids": some(1, 5), "rejected_ids": some(1, 7)}
        for _ in range(PAIRS * ACCUMULATED * STEPS)
    ]
    return example().add_reference(tiny_model(), rows)


def by_hand() -> dict[str, torch.Tensor]:
    """Weights after training in one process of plain transformers, by the formula of the paper."""
    model, rows = tiny_model().train(), pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for first in range(0, len(rows), PAIRS * ACCUMULATED):
        for start in range(first, first + PAIRS * ACCUMULATED, PAIRS):
            losses = []
            for row in rows[start : start + PAIRS]:
                margin = torch.zeros(())
                for sign, side in ((1, "chosen"), (-1, "rejected")):
                    answer = row[f"{side}_ids"]
                    logits = model(input_ids=torch.tensor([[*row["prompt_ids"], *answer]])).logits[0]
                    said = logits.log_softmax(-1)[-len(answer) - 1 : -1].gather(-1, torch.tensor(answer)[:, None]).sum()
                    margin = margin + sign * (said - row[f"ref_{side}_logps"])
                losses.append(-logsigmoid(0.1 * margin))
            (torch.stack(losses).mean() / ACCUMULATED).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def on_ranks(folder: str, stages: int) -> None:
    """Train by the example's trainer, and write the model."""
    import weft

    weft.init_distributed()
    replicas = torch.distributed.get_world_size() // stages
    settings = {
        "use_cpu": True,
        "num_train_epochs": 1,
        "per_device_train_batch_size": PAIRS,
        "gradient_accumulation_steps": ACCUMULATED // replicas,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
    }
    used = arguments(folder, deepspeed=section(stages), **settings)
    trainer = example().DPOTrainer(tiny_model(), used, train_dataset=pairs(), data_collator=example().collate)
    trainer.train()
    trainer.save_model(f"{folder}/trained")
