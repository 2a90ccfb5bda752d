"""Weft: one training job over several data centres, from one schedule value."""

from __future__ import annotations

import logging
from typing import Any

__version__ = "0.1.0"

# peft imports bitsandbytes 0.50, and transformers torchao 0.18, even if they are not used. On some machines they warn
# that a kernel is not there, and torch 2.13 warns of how torchao registers enumerations.
for _logger in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_logger).setLevel(logging.ERROR)

_HOMES = {
    "init_distributed": "weft.engine.initialize",
    "initialize": "weft.engine.initialize",
    "WeftEngine": "weft.engine.engine",
    "WeftTrainer": "weft.engine.huggingface.trainer",
    "WeftConfig": "weft.conf.schema",
    "Objective": "weft.engine.models.objective",
    "next_token_loss": "weft.engine.models.objective",
}
__all__ = [
    "Objective",
    "WeftConfig",
    "WeftEngine",
    "WeftTrainer",
    "init_distributed",
    "initialize",
    "next_token_loss",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use: reading a schedule must not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
