"""Training and export of a new model with parallel blocks and windows, on ranks of their own."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from tests.engine.tiny import batches, tiny_config

WINDOW, STEPS = 4, 50


def train_and_export(folder: str) -> tuple[float, float]:
    """Train two stages, export them, write the logits of a batch, and return the first and last loss."""
    from weft.engine.checkpoint import export
    from weft.engine.initialize import initialize

    config = tiny_config("zbv", "fold", layers=8)
    config.model.arch, config.model.parallel_block, config.model.sliding_window = "cohere2", True, WINDOW
    config.model.self_check, config.train.steps, config.optimizer.lr = True, STEPS, 1e-2
    engine, *_ = initialize(config=config)
    step = [next(batches(engine.replica, engine.num_replicas)) for _ in range(config.pipeline.microbatches)]
    losses = [float(engine.train_batch(iter(step))) for _ in range(STEPS)]
    _, logits = engine.eval_batch(iter(step), return_logits=True, num_micro_batches=1)
    if engine.holds_loss:
        save_file({"logits": logits[0].contiguous()}, Path(folder, "logits.safetensors"))
    export(engine, Path(folder, "export"))
    return losses[0], losses[-1]
