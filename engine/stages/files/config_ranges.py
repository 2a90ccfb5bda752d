"""Ranges of a model configuration's numbers that transformers does not check."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

MOST_PARTS = 10_000
"""Maximum number of layers or experts, because transformers makes a module for each."""
_RANGES = (
    (re.compile(r"(^|_)(layers?|experts?|blocks?)$"), -math.inf, MOST_PARTS, f"more than {MOST_PARTS:,}"),
    (re.compile(r"_eps(ilon)?$|(rope|rotary).*(theta|base)$|^factor$"), 1e-30, math.inf, "not above 0"),
    (re.compile(r"dropout|pdrop"), 0, 1, "not between 0 and 1"),
)
"""Least and largest values by patterns of fields, beyond which a model cannot be made or computes NaN."""


class ImpossibleNumber(ValueError):
    """Error of a number in a model's configuration."""


def require_possible(fields: Mapping[str, Any]) -> None:
    """Check the numbers of a model's configuration.

    Raises:
        ImpossibleNumber: one is not finite, or out of its range.
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            require_possible(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            faults = (what for names, least, most, what in _RANGES if names.search(name) and not least <= value <= most)
            if fault := next(faults, None) if math.isfinite(value) else "not a finite number":
                raise ImpossibleNumber(f"{name}={value}: {fault}")
