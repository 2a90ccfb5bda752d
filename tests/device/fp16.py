"""Steps in fp16 whose loss scale falls, rises and falls again, by Weft's engine and by DeepSpeed's own."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from tests.engine.tiny import LENGTH, VOCAB, batches, own_loss

STEPS, MICROBATCHES = 14, 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROBATCHES,
    "steps_per_print": None,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "initial_scale_power": 23, "hysteresis": 2, "loss_scale_window": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 9}},
}
OVERRIDES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
ZERO_1 = {"zero_optimization": {"stage": 1}}
"""DeepSpeed's fp16 without ZeRO has another rule for its scale, without hysteresis."""
Row = tuple[float, float, int, float]
"""Loss, loss scale, skipped steps and learning rate after a step."""


def _row(engine: Any, loss: float) -> Row:
    return loss, engine.optimizer.cur_scale, engine.skipped_steps, engine.get_lr()[0]


def weft_rows(stages: int = 1, zero: int = 0, max_skips: int = 0) -> tuple[list[Row], list[str]]:
    """Train on this rank's device. Return what each step left, and the operators that it ran after its host wait."""
    from tests.device import cuda
    from weft.engine.initialize import initialize
    from weft.engine.zero.optimizer import ShardedOptimizer

    weft = {
        "enabled": True,
        "pipeline": {"stages": stages},
        "model": {"arch": "llama", "overrides": OVERRIDES, "self_check": False},
        "supervise": {"max_skips": max_skips},
    }
    engine, *_ = initialize(config=CONFIG | {"zero_optimization": {"stage": zero}, "weft": weft})
    ran: Counter[str] = Counter()

    def conclude() -> None:
        nonlocal ran
        ran = cuda.observed("operators")
        ShardedOptimizer.conclude(engine.optimizer)

    engine.optimizer.conclude = conclude
    engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
    rows, after = [], list[str]()
    for _ in range(STEPS):
        loss = engine.train_batch()
        after += cuda.observed("operators") - ran
        rows.append(_row(engine, float(loss)))
    engine.destroy()
    assert not cuda.observed("races") and not cuda.observed("contexts"), cuda.observed("races")
    return rows, after


def deepspeed_rows() -> list[Row]:
    """Return what each step of DeepSpeed's own fp16 engine left, on the same batches, without a device."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from weft.conf.schema import ModelConfig, TrainConfig
    from weft.engine.distributed import init_distributed
    from weft.engine.stages.files.loading import build_model

    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign]
    init_distributed(60)
    model_config = ModelConfig(arch="llama", overrides=OVERRIDES, self_check=False)
    model = build_model(model_config, dtype=torch.float32, seed=TrainConfig().seed).train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=CONFIG | ZERO_1)
    data, rows = batches(0, 1), []
    for _ in range(STEPS):
        step = list(itertools.islice(data, MICROBATCHES))
        items = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step))
        total = 0.0
        for batch in step:
            loss = own_loss(engine, batch, items, len(step))
            engine.backward(loss * len(step))  # DeepSpeed divides by the number of micro-batches
            engine.step()
            total += loss.item()
        rows.append(_row(engine, total))
    return rows
