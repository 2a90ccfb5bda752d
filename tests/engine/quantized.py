"""Losses and exports of adapters over a base with 4-bit weights: of Weft's ranks, and of peft in one process."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.engine.tiny import batches, tiny_config, train_alone
from weft.conf.schema import Quantization, WeftConfig
from weft.engine.precision import DTYPES
from weft.engine.stages.files.loading import build_model

STEPS = 20


def quantized_config(base: str, kind: str = "nf4", *, double: bool = True, **more) -> WeftConfig:
    config = tiny_config(lora=True, layers=4, **more)
    config.model.path, config.model.overrides = base, {}
    config.model.lora.quantize, config.model.lora.double_quantize = Quantization[kind], double
    config.model.lora.target_modules = ["all-linear"]
    config.optimizer.lr = 5e-3
    return config


def peft_model(base: str, config: WeftConfig) -> nn.Module:
    """Return peft's model over transformers' 4-bit base, with the initial adapters of a run."""
    lora, dtype = config.model.lora, DTYPES[config.train.precision]
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantize.name,
        bnb_4bit_use_double_quant=lora.double_quantize,
        bnb_4bit_compute_dtype=dtype,
    )
    given = {} if lora.quantize is Quantization.none else {"quantization_config": settings}
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **given)
    targets = "all-linear" if lora.target_modules == ["all-linear"] else lora.target_modules
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    model = peft.get_peft_model(whole, adapters)
    ours = dict(build_model(config.model, dtype=dtype, seed=config.train.seed).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(ours[name])
    return model.train()


def repeated(config: WeftConfig, replica: int, num_replicas: int, per_batch: int = 1) -> Iterator[dict[str, Tensor]]:
    """Yield the micro-batches of the first step again and again, so that the loss falls."""
    count = config.pipeline.microbatches * per_batch
    return itertools.cycle(list(itertools.islice(batches(replica, num_replicas), count)))


def losses_of_peft(base: str, config: WeftConfig, num_replicas: int) -> list[float]:
    """Train peft's model in one process on the batches of all replicas."""
    return train_alone(peft_model(base, config), config, num_replicas, STEPS, repeated(config, 0, 1, num_replicas))


def train_each(folder: str, cases: dict[str, WeftConfig]) -> dict[str, list[float]]:
    """Train engines and export to ``folder/NAME``. With ZeRO they stop halfway and resume from their checkpoint."""
    from weft.engine.checkpoint import export
    from weft.engine.initialize import initialize

    found = {}
    for name, config in cases.items():
        engine, *_ = initialize(config=config)
        engine.set_dataiterator(repeated(config, engine.replica, engine.num_replicas))
        losses = [float(engine.train_batch()) for _ in range(STEPS // 2)]
        engine.eval_batch(batches(engine.replica, engine.num_replicas), num_micro_batches=2)
        if config.zero.stage:
            engine.save_checkpoint(str(Path(folder, name, "checkpoint")))
            engine.destroy()
            engine, *_ = initialize(config=config)
            engine.load_checkpoint(str(Path(folder, name, "checkpoint")))
            engine.set_dataiterator(repeated(config, engine.replica, engine.num_replicas))
        losses += [float(engine.train_batch()) for _ in range(STEPS - STEPS // 2)]
        export(engine, Path(folder, name, "export"))
        engine.destroy()
        dist.barrier()
        del engine
        gc.collect()
        found[name] = losses
    return found
