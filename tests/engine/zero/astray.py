"""A run that goes astray after it was saved, on ranks of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.engine.tiny import begun
from weft.conf.schema import WeftConfig


def go_astray(configs: list[WeftConfig], folder: str) -> list[dict[str, Any]]:
    """Return for each configuration: two good steps, saved and exported; then a rate that no weight survives."""
    from weft.engine.checkpoint import export

    found = []
    for number, config in enumerate(configs):
        engine = begun(config)
        good = [float(engine.train_batch()) for _ in range(2)]
        kept, exported = f"{folder}/{number}", Path(folder, f"export{number}")
        engine.save_checkpoint(kept)
        export(engine, exported)
        before = {path.name: path.read_bytes() for path in sorted(exported.iterdir())}
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e30
        engine.lr_scheduler = None  # which would set it again
        errors = [
            _error(engine, lambda engine: [engine.train_batch() for _ in range(6)]),
            _error(engine, lambda engine, kept=kept: engine.save_checkpoint(kept)),
            _error(engine, lambda engine, exported=exported: export(engine, exported)),
        ]
        after = {path.name: path.read_bytes() for path in sorted(exported.iterdir())}
        path, _ = engine.load_checkpoint(kept)
        engine.check_finite()
        found.append(
            {
                "good": good,
                "errors": errors,
                "steps": engine.global_steps,
                "checkpoint": Path(path or "").name,
                "folders": sorted(path.name for path in Path(kept).iterdir()),
                "export is as it was": before == after,
            }
        )
        engine.destroy()
    return found


def _error(engine: Any, action: Callable[[Any], Any]) -> str:
    """Return the error of a collective call about non-finite numbers, on this rank."""
    from weft.engine.zero import NonFiniteError

    try:
        action(engine)
        said = ""
    except NonFiniteError as error:
        said = str(error)
    dist.barrier()
    return said
