"""Allowed ranges of numbers, written at their fields: ``steps: Annotated[int, COUNT] = 100``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, get_args, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST = 2**63 - 1
"""The largest allowed number of any field."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, except open ends and numbers above `LARGEST`, which 64 bits cannot store."""

    low: float
    high: float = inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, number: float) -> bool:
        above = self.low < number if self.low_open else self.low <= number
        below = number < self.high if self.high_open else number <= self.high
        return above and below and number <= LARGEST

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = f"below {self.high:g}" if self.high_open else f"at most {self.high:g}"
        return low if self.high == inf else f"{low} and {high}"

    def remedy(self, number: float) -> str:
        """Return the remedy for ``number``, which is outside of the range."""
        return f"at most {LARGEST:.2g}" if number > LARGEST and self.high == inf else str(self)


NATURAL = Range(0)
COUNT = Range(1)
POSITIVE = Range(0, low_open=True)
SHARE = Range(0, 1, high_open=True)


@cache
def ranges(kind: type) -> dict[str, Range]:
    """Return the range of every number with a range in a configuration class, by its dotted name."""
    found: dict[str, Range] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if is_dataclass(hint) and isinstance(hint, type):
            found |= {f"{name}.{below}": allowed for below, allowed in ranges(hint).items()}
        elif allowed := next((part for part in get_args(hint) if isinstance(part, Range)), None):
            found[name] = allowed
    return found


def out_of_range(config: DataclassInstance) -> Iterator[str]:
    """Yield a line for each number outside of its range. Null is not checked."""
    for name, allowed in ranges(type(config)).items():
        value = attrgetter(name)(config)
        if value is not None and value not in allowed:
            yield f"{name}={_short(value)}: outside its range; choose a value {allowed.remedy(value)}"


def _short(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # an integer larger than any float
        return "inf" if value > 0 else "-inf"
