"""Non-negative least squares for the three coefficients of a chunk's cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

Coefficients = tuple[float, float, float]
"""Seconds, seconds per token, seconds per pair of tokens."""

PRIOR: Coefficients = (0.03, 5e-4, 1e-7)
"""Coefficients before any measurement: slower than almost any machine, so that the first grants are small."""
PSEUDO = ((1, 0), (512, 0), (512, 4096))
"""Pseudo-observations (tokens, context) of the prior, with a small weight."""
PSEUDO_WEIGHT = 0.01
FORGETTING = 0.998
"""Weight of a measurement relative to the next one."""


def features(tokens: int, context: float) -> Coefficients:
    """Return the features of a chunk, which the coefficients multiply."""
    return 1.0, float(tokens), tokens * context + tokens * tokens / 2.0


def _prior_s(tokens: int, context: int) -> float:
    return sum(a * x for a, x in zip(PRIOR, features(tokens, context), strict=True))


@dataclass
class Sums:
    """Normal equations of ``row . coefficients = 1``, where a row is the features divided by the measured seconds.

    Attributes:
        square: [3, 3], sums of products of rows, in units of the prior.
        right: [3], sums of rows.
    """

    square: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    right: list[float] = field(default_factory=lambda: [0.0] * 3)

    def __post_init__(self) -> None:
        if not any(self.right):
            for tokens, context in PSEUDO:
                self.add(tokens, context, _prior_s(tokens, context), weight=PSEUDO_WEIGHT)

    def add(self, tokens: int, context: float, seconds: float, *, weight: float = 1.0) -> None:
        """Add a chunk that took ``seconds``, and discount earlier ones."""
        row = [x * unit / seconds for x, unit in zip(features(tokens, context), PRIOR, strict=True)]
        for i, x in enumerate(row):
            self.right[i] = FORGETTING * self.right[i] + weight * x
            for j, y in enumerate(row):
                self.square[i][j] = FORGETTING * self.square[i][j] + weight * x * y

    def fit(self) -> Coefficients:
        """Return the best non-negative coefficients, over all choices of which coefficients are zero."""
        best, least = [0.0, 0.0, 0.0], 0.0
        for size in (3, 2, 1):
            for used in combinations(range(3), size):
                found = _solve([[self.square[i][j] for j in used] for i in used], [self.right[i] for i in used])
                if found is None or min(found) < 0.0:
                    continue
                # The squared error at the minimum, up to a constant.
                error = -sum(a * self.right[i] for a, i in zip(found, used, strict=True))
                if error < least:
                    least, best = error, [0.0, 0.0, 0.0]
                    for a, i in zip(found, used, strict=True):
                        best[i] = a
        return best[0] * PRIOR[0], best[1] * PRIOR[1], best[2] * PRIOR[2]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small positive definite system by elimination. Return None if it is singular."""
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        if rows[i][i] <= 1e-12 * matrix[i][i]:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
