"""Limits on the size of inputs, so that a small file cannot exhaust memory or time."""

from __future__ import annotations

import reprlib
from math import isfinite
from typing import Any

MOST_ACTIONS = 20_000_000
"""Actions per step: 10,000 ranks with 2,000 actions each."""
MOST_RANKS = 100_000
MOST_LEGS = 1_000
MOST_NUMBER = 1e18
"""Largest number of bytes or milliseconds: an exabyte, or 30 million years."""
_MOST_BITS = 4096


class _Short(reprlib.Repr):
    """A `Repr` that also shortens integers with more digits than Python converts to text."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _MOST_BITS:
            return f"<a number of {x.bit_length()} bits>"
        return super().repr_int(x, level)


def short_repr(value: Any) -> str:
    """``repr`` of a value that a user gave, shortened to a readable length."""
    short = _Short()
    short.maxstring = short.maxother = short.maxlong = 60
    short.maxlist = short.maxdict = short.maxtuple = 4
    short.maxlevel = 2
    return short.repr(value)


def check_size(num_stages: int, num_microbatches: int) -> None:
    """Check that a step has no more than ``MOST_ACTIONS`` actions.

    Raises:
        ValueError: it has more; the message names their number.
    """
    actions = 3 * num_stages * num_microbatches
    if actions > MOST_ACTIONS:
        raise ValueError(
            f"pipeline.microbatches={num_microbatches}: {actions:.3g} actions on {num_stages} virtual stages, more "
            f"than {MOST_ACTIONS:.0e}; use fewer micro-batches"
        )


def number(value: Any, name: str, *, above: float | None = None, free: bool = False) -> float:
    """Convert ``value`` to a finite number of at least 0, or above ``above``.

    Args:
        name: the field, for the message.
        free: also accept infinity, which means "no limit".

    Raises:
        ValueError: ``value`` is not such a number.
    """
    # YAML 1.1 reads 1e6 as text, so convert text too.
    try:
        found = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    in_range = found >= 0 if above is None else found > above
    if not in_range or not ((isfinite(found) and found <= MOST_NUMBER) or free):
        least = "at least 0" if above is None else f"above {above:g}"
        raise ValueError(f"{name}={short_repr(value)}: expected a number {least}, and finite (at most {MOST_NUMBER:g})")
    return found


def count(value: Any, name: str, *, least: int = 1, most: int = 10**9) -> int:
    """Check that ``value`` is an integer from ``least`` to ``most``, and not a bool. Raise ValueError if it is not."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={short_repr(value)}: expected a whole number of at least {least} and at most {most}")
    return value


def known_fields(data: Any, name: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Check that ``data`` is a table whose fields are all in ``known``, and return it.

    Raises:
        ValueError: it is not; the message names the unknown field.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{name}: expected a table of {', '.join(known)}; got {short_repr(data)}")
    unknown = [key for key in data if key not in known]
    if unknown:
        raise ValueError(f"{name}: field {short_repr(unknown[0])} is not known; one of {', '.join(known)}")
    return dict(data)
