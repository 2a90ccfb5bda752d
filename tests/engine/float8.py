"""Losses, evaluations and exports of fp8 linear layers on ranks, and losses of torchao's layers in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.engine.tiny import batches, begun, check_order, own_loss, tiny_config
from weft.conf.schema import Recompute, WeftConfig

STEPS = 20


def config_of(recipe: str, keywords: dict[str, Any]) -> WeftConfig:
    keywords = dict(keywords)
    level = Recompute[keywords.pop("recompute", "none")]
    config = tiny_config(precision="bf16", layers=4, float8=recipe, **keywords)
    config.pipeline.recompute = level
    config.model.overrides |= {"head_dim": 32, "num_key_value_heads": 2}
    return config


def convert(model: nn.Module, recipe: str) -> None:
    """Replace a model's linear layers by torchao's."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: "lm_head" not in name and "lora_" not in name,
        config=Float8LinearConfig.from_recipe_name(recipe),
    )


def torchao_loss(recipe: str) -> Callable[..., Tensor]:
    """Return a function that computes the loss of a model with torchao's layers, which it converts if needed."""

    def loss(model: nn.Module, *args: Any) -> Tensor:
        if not any(type(module).__name__ == "Float8Linear" for module in model.modules()):
            convert(model, recipe)
        return own_loss(model, *args)

    return loss


def trained(configs: list[WeftConfig], folder: str) -> list[tuple[list[float], float]]:
    """Return the losses of each run and of an evaluation, and export it. Runs with ZeRO resume halfway."""
    from weft.engine.checkpoint import export
    from weft.engine.initialize import initialize

    found = []
    for number, config in enumerate(configs):
        engine, place = begun(config), Path(folder, str(number))
        losses = [float(engine.train_batch()) for _ in range(STEPS // 2)]
        data = batches(engine.replica, engine.num_replicas)
        for _ in range(STEPS // 2 * config.pipeline.microbatches):
            next(data)
        if config.zero.stage:
            engine.save_checkpoint(str(place / "checkpoint"))
            engine.destroy()
            engine, *_ = initialize(config=config)
            engine.load_checkpoint(str(place / "checkpoint"))
        engine.set_dataiterator(data)
        losses += [float(engine.train_batch()) for _ in range(STEPS // 2)]
        check_order(engine)
        evaluation = float(engine.eval_batch(batches(0, 1), num_micro_batches=1))
        export(engine, place / "export")
        engine.destroy()
        found.append((losses, evaluation))
    return found
