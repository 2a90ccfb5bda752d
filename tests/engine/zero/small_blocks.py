"""Ranks in which tiny models have 8-bit moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LEAST = 64


def with_small_blocks(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process in which parameters of 64 elements and more have 8-bit moments."""
    from weft.engine.zero import int8_adamw

    int8_adamw.has_int8_state = lambda count: count >= LEAST  # type: ignore[assignment]
    return function(*arguments)
