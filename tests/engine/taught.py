"""A teacher that is streamed or not: its scores, and the memory that it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.distilled import distilled
from tests.engine.tiny import tiny_config
from weft.conf.schema import WeftConfig
from weft.engine.models.batch import Batch
from weft.engine.stages.teacher import Teacher

WORDS, LAYERS = 64, 6


def settings(folder: Path, width: int, *, ahead: bool) -> WeftConfig:
    """Save a teacher, and return the settings of a run in which it is streamed, or not."""
    torch.manual_seed(7)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": LAYERS}
    LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=4, **shape)).save_pretrained(folder)
    config = distilled(tiny_config(), teacher=str(folder), top_k=5)
    config.data.cache_dir = str(folder / "cache")
    config.inference.scores = replace(config.inference.scores, enabled=ahead)
    return config


def micro_batches(device: str) -> list[Batch]:
    """Return micro-batches of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(WORDS, (2, 12), generator=generator).to(device) for _ in range(3)]
    return [{"input_ids": each, "position_ids": torch.arange(12, device=device).repeat(2, 1)} for each in ids]


def scores(config: WeftConfig, device: str = "cpu") -> tuple[list, int, int]:
    """Return the scores of two steps, and what a load and the scores take of the device: at rest, and at most."""
    teacher = Teacher(config, WORDS)
    before, peak = _memory(device), 0
    teacher.load(torch.device(device))
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    found = [torch.stack(teacher.scores_of_tokens(micro_batches(device))).cpu() for _ in range(2)]
    if device != "cpu":
        peak = torch.cuda.max_memory_allocated() - before
    return [each.tolist() for each in found], _memory(device) - before, peak


def _memory(device: str) -> int:
    return psutil.Process().memory_info().rss if device == "cpu" else torch.cuda.memory_allocated()
