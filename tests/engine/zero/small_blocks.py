"""Ranks in which tiny models have 8-bit moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.conf.schema import WeftConfig

LEAST = 64


def with_small_blocks(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process in which parameters of 64 elements and more have 8-bit moments."""
    from weft.engine.zero import int8_adamw

    int8_adamw.has_int8_state = lambda count: count >= LEAST  # type: ignore[assignment]
    return function(*arguments)


def losses_with_bitsandbytes(config: WeftConfig, least: int) -> list[float] | str:
    """Return the losses of two steps of an engine that is given bitsandbytes' optimizer, or the error.

    Args:
        least: least elements of a parameter with 8-bit moments.
    """
    import bitsandbytes

    from tests.engine.tiny import batches
    from weft.engine.initialize import initialize

    def make(groups: Any) -> Any:
        return bitsandbytes.optim.AdamW8bit(groups, lr=1e-3, min_8bit_size=least)

    try:
        engine, *_ = initialize(config=config, optimizer=make)
    except ValueError as error:
        return str(error)
    engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
    return [float(engine.train_batch()) for _ in range(2)]
