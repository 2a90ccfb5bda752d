"""The terminal at which a person watches, which a rank may reach only through a pipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

_USUAL = 80
COLUMNS = "WEFT_COLUMNS"
"""Environment variable of ranks: width of the terminal that shows their output."""


def columns_of(stream: TextIO) -> int:
    """Return the width of a terminal, or 0 if ``stream`` is none, or has no size, as under `ssh -tt` and `script`."""
    if not stream.isatty():
        return 0
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return _USUAL
    return size.columns if size.lines > 0 else 0


def columns_behind(stream: TextIO, environment: Mapping[str, str]) -> int:
    """Return `columns_of` the stream, or the width in ``environment`` if that is 0."""
    text = environment.get(COLUMNS, "")
    return columns_of(stream) or (int(text) if text.isdecimal() else 0)
