"""Limits on what a file or a command may ask for, so that a few bytes cannot take all memory or time."""

from __future__ import annotations

import re
import reprlib
from math import isfinite
from pathlib import Path
from typing import Any

MOST_FILE_BYTES = 256 * 2**20
MOST_NESTING = 32
"""Brackets in brackets of a YAML file: PyYAML takes time by their square."""
MOST_ACTIONS = 20_000_000
"""Computations of a step: 10,000 ranks with 2,000 of them each."""
MOST_RANKS = 100_000
MOST_LEGS = 1_000
MOST_NUMBER = 1e18
"""Bytes, or milliseconds, of anything: an exabyte, or 30 million years."""


def shown(value: Any) -> str:
    """``repr`` of what a user gave, cut to a readable length."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    short.maxlist = short.maxdict = short.maxtuple = 4
    short.maxlevel = 2
    return short.repr(value)


def read_text(path: Path, *, most_bytes: int = MOST_FILE_BYTES) -> str:
    """A text file of bearable size.

    Raises:
        ValueError: it cannot be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read ({error})") from error
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes >> 20} MiB; give a smaller file")
    return text


def check_nesting(text: str) -> None:
    """Refuse brackets that stand deeper in each other than anything that means something.

    Raises:
        ValueError: they do.
    """
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_NESTING:
            raise ValueError(f"cannot be read (brackets nested more than {MOST_NESTING} deep)")


def check_size(num_stages: int, num_microbatches: int) -> None:
    """Refuse a step that no machine could plan.

    Raises:
        ValueError: it has too many actions; says how many.
    """
    actions = 3 * num_stages * num_microbatches
    if actions > MOST_ACTIONS:
        raise ValueError(
            f"pipeline.microbatches={num_microbatches}: {actions:.3g} actions on {num_stages} virtual stages, more "
            f"than {MOST_ACTIONS:.0e}; use fewer micro-batches"
        )


def number(value: Any, name: str, *, above: float | None = None, free: bool = False) -> float:
    """A finite number of at least 0, or above ``above``; infinite only where that means "no limit" (``free``).

    Raises:
        ValueError: it is something else; names it.
    """
    # YAML 1.1 reads 1e6 as text; Python reads it as what is meant.
    try:
        found = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    in_range = found >= 0 if above is None else found > above
    if not in_range or not ((isfinite(found) and found <= MOST_NUMBER) or free):
        least = "at least 0" if above is None else f"above {above:g}"
        raise ValueError(f"{name}={shown(value)}: expected a number {least}, and finite (at most {MOST_NUMBER:g})")
    return found


def count(value: Any, name: str, *, least: int = 1, most: int = 10**9) -> int:
    """A whole number, and no truth value.

    Raises:
        ValueError: it is something else; names it.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={shown(value)}: expected a whole number of at least {least} and at most {most}")
    return value
