"""Exports of engines in low precision, right after they were made and after a step, on ranks of their own."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from tests.engine.tiny import batches, tiny_config
from weft.conf.schema import ExportDtype
from weft.engine.precision import EXPORTED


def given_model(base: str, kind: str) -> nn.Module:
    """A model in memory: as loaded, with half of its layers frozen, or with adapters and a resized vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." not in name and "embed" not in name)
    if kind == "adapters":
        torch.manual_seed(0)
        model.resize_token_embeddings(72)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    return model


def export_each(base: str, folder: str, cases: list[dict[str, Any]]) -> None:
    """Export engines to ``folder/NUMBER``."""
    from deepspeed.accelerator import get_accelerator

    from weft.engine.checkpoint import export
    from weft.engine.initialize import initialize

    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign]
    for number, given in enumerate(cases):
        case = dict(given)
        kind, steps, dtype = case.pop("kind", ""), case.pop("steps", 0), ExportDtype(case.pop("dtype", "base"))
        is_still, resumes = case.pop("still", False), case.pop("resumes", False)
        config = tiny_config(**case)
        if is_still:
            config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.warmup_steps = 1e-30, 0.0, 0
        config.train.export_dtype = dtype
        config.model.path = "" if kind in ("memory", "frozen", "adapters", "new") else base
        if kind != "new":
            config.model.overrides = {}
        model = given_model(base, kind) if kind in ("memory", "frozen", "adapters") else None
        engine, *_ = initialize(model=copy.deepcopy(model), config=config)
        if steps:
            engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
            for _ in range(steps):
                engine.train_batch()
        if resumes:
            engine.save_checkpoint(str(Path(folder, "checkpoints")))
            engine, *_ = initialize(config=config)
            assert engine.load_checkpoint(str(Path(folder, "checkpoints")))[0]
            engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
            engine.train_batch()
        export(engine, Path(folder, str(number)), dtype=EXPORTED.get(dtype))
        dist.barrier()
        del engine
        gc.collect()
