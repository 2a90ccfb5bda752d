"""The cost model of prefill chunks: learnt online, and conservative.

A chunk of n tokens after c tokens of context takes ``A + B n + C (n c + n^2 / 2)`` seconds: a step's
fixed cost, matrix products, attention. The coefficients are fitted by non-negative least squares of
relative errors. A step after an idle gap is slower than one directly after another step (cold caches and clocks). So
predictions are scaled by a high quantile of the relative errors, per class of gap.

Long delays by the host are rare, and no property of the chunk. The quantile leaves out a few outliers. The latest steps
bound it, so a few normal steps are enough to lower it again.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from weft.conf.host.measurements import Measurement, Measurements, spread_of
from weft.conf.host.owners import is_trusted
from weft.inference.placement.nonnegative_fit import PRIOR, Coefficients, Sums, features

logger = logging.getLogger(__name__)

GAPS_S = (0.001, 0.005, 0.02, 0.1, 0.5)
"""Boundaries between classes of idle time before a step."""
MEMORY = 128
"""Number of recent steps kept per class of gap."""
PRIOR_SCALE = 1.5
"""Scale of a class of gap without enough measurements."""
TRUSTED = 8
"""Number of measurements from which a class of gap uses its own quantile."""
OUTLIER = 4.0
"""A step that took this many times the class's median was delayed, if such steps are few."""
MAX_OUTLIERS = 0.1
"""Share of a class's steps that may be left out as outliers; at least one."""
LATEST = 4
"""Number of latest steps that bound the scale of their class."""
LATEST_SCALE = 1.5
"""The bound: this many times the slowest of the latest steps."""
FORMAT = 1
NAME = "costs of prefills"
"""The name of the measurement in its file."""

Chunk = tuple[int, float, float]
"""Tokens, context, seconds."""


@dataclass(kw_only=True)
class PrefillCost:
    """The cost of chunks on one machine for one model. It learns by `observe`.

    Attributes:
        quantile: share of chunks that should take no longer than predicted.
        steps: number of observed chunks.
    """

    quantile: float = 0.98
    steps: int = 0
    _fit: Coefficients = PRIOR
    _sums: Sums = field(default_factory=Sums)
    _seen: list[deque[Chunk]] = field(default_factory=lambda: [deque(maxlen=MEMORY) for _ in range(len(GAPS_S) + 1)])
    # Derived from the fields above, when they are used.
    _scales: list[float] = field(default_factory=lambda: [PRIOR_SCALE] * (len(GAPS_S) + 1), compare=False)
    _stale: set[int] = field(default_factory=lambda: set(range(len(GAPS_S) + 1)), compare=False)

    def typical_s(self, tokens: int, context: float) -> float:
        """Return the expected seconds of a chunk of ``tokens`` after ``context`` tokens."""
        return sum(a * x for a, x in zip(self._fit, features(tokens, context), strict=True))

    def predict_s(self, tokens: int, context: int, gap_s: float) -> float:
        """Return the `quantile` of the seconds that such a chunk takes.

        Args:
            tokens: number of tokens of the chunk, or of all chunks of the step.
            context: number of tokens computed before the chunk.
            gap_s: idle time before the step.
        """
        return self.typical_s(tokens, context) * self._scale(gap_class(gap_s))

    def tokens_within(self, seconds: float, context: int, gap_s: float, most: int) -> int:
        """Return the most tokens, up to ``most``, that are predicted to finish within ``seconds``, or 0."""
        a, b, c = self._fit
        budget_s = seconds / self._scale(gap_class(gap_s)) - a
        linear = b + c * context
        if budget_s <= 0.0 or most <= 0:
            return 0
        if c > 0.0:
            tokens = (-linear + sqrt(linear * linear + 2.0 * c * budget_s)) / c
        else:
            tokens = budget_s / linear if linear > 0.0 else float(most)
        return min(most, int(tokens))

    def observe(self, tokens: int, context: float, gap_s: float, seconds: float) -> None:
        """Learn from a chunk that took ``seconds``."""
        if tokens <= 0 or seconds <= 0.0:
            return
        self._sums.add(tokens, context, seconds)
        self._fit = self._sums.fit()
        self._seen[gap_class(gap_s)].append((tokens, context, seconds))
        self._stale.update(range(len(self._seen)))
        self.steps += 1

    def _scale(self, gap: int) -> float:
        seen = self._seen[gap]
        if gap in self._stale and len(seen) >= TRUSTED:
            self._scales[gap] = scale_of([took_s / self.typical_s(n, c) for n, c, took_s in seen], self.quantile)
        self._stale.discard(gap)
        return self._scales[gap]

    def __str__(self) -> str:
        a, b, c = self._fit
        scales = ", ".join(
            f"{scale:.2f} {'after ' if border else 'below '}{1e3 * (border or GAPS_S[0]):g} ms"
            for border, scale, seen in zip(
                (0.0, *GAPS_S), map(self._scale, range(len(self._seen))), self._seen, strict=True
            )
            if len(seen) >= TRUSTED
        )
        return (
            f"{1e3 * a:.2f} ms + {1e6 * b:.1f} us n + {1e9 * c:.1f} ns (n c + n^2 / 2), times {scales or 'the prior'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the model as a JSON value."""
        return {
            "format": FORMAT,
            "quantile": self.quantile,
            "steps": self.steps,
            "fit": self._fit,
            "square": self._sums.square,
            "right": self._sums.right,
            "seen": [list(chunks) for chunks in self._seen],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> PrefillCost:
        """Create a model from the result of `to_dict`. Raise ValueError if the value has another version's format."""
        if value.get("format") != FORMAT:
            raise ValueError(f"format={value.get('format')}: this version of Weft reads {FORMAT}")
        return cls(
            quantile=value["quantile"],
            steps=value["steps"],
            _fit=tuple(value["fit"]),
            _sums=Sums(square=value["square"], right=value["right"]),
            _seen=[deque(map(tuple, chunks), maxlen=MEMORY) for chunks in value["seen"]],
        )

    def save(self, path: Path) -> None:
        """Write the model to a file, atomically, with the date, the host's load and the spread of the measurements.

        Raises:
            OSError: the file cannot be written.
        """
        ratios = [took_s / self.typical_s(n, c) for seen in self._seen for n, c, took_s in seen]
        spread = spread_of(ratios, 1.0) if ratios else None
        Measurements(path).put({NAME: Measurement.now(self.to_dict(), spread)})

    @classmethod
    def load(cls, path: Path, *, quantile: float) -> PrefillCost:
        """Load the model of earlier runs; a new model if there is no such file, or one that others could have written.

        A model that was last saved long ago is not used either. All others are used, because each step corrects them.

        Raises:
            ValueError: the file is not a cost model, or of another version.
        """
        if not path.exists() or not is_trusted(path):
            return cls(quantile=quantile)
        known = Measurements(path).read().get(NAME)
        if known is None:
            raise ValueError(f"{path}: not a cost model of this version of Weft")
        if known.is_old:
            return cls(quantile=quantile)
        try:
            return cls.from_dict({**known.value, "quantile": quantile})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def load_or_set_aside(cls, path: Path, *, quantile: float) -> PrefillCost:
        """Load the model as `load` does. If the file is invalid, rename it with a warning, and return a new model.

        Raises:
            OSError: the file cannot be moved.
        """
        try:
            return cls.load(path, quantile=quantile)
        except ValueError as error:
            aside = path.with_name(f"{path.name}.former")
            path.replace(aside)
            logger.warning("%s; moved to %s, and costs are learnt anew", error, aside)
            return cls(quantile=quantile)


def gap_class(gap_s: float) -> int:
    """Return the index of the class of idle time before a step."""
    return bisect_right(GAPS_S, gap_s)


def scale_of(ratios: Sequence[float], quantile: float) -> float:
    """Return the scale of a class of gap, from the relative durations of its steps in order of time.

    It is the quantile of all but a few outliers, bounded by the latest steps.
    """
    limit = OUTLIER * median(ratios)
    typical = [ratio for ratio in ratios if ratio <= limit]
    if len(ratios) - len(typical) > max(1, int(MAX_OUTLIERS * len(ratios))):
        typical = list(ratios)
    slowest = sorted(typical)[ceil(quantile * len(typical)) - 1]
    return min(slowest, LATEST_SCALE * max(typical[-LATEST:]))
