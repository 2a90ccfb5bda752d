"""A worker's recent slowdown relative to predictions."""

from __future__ import annotations

SHORTEST_S = 0.1
"""Lower bound on predicted durations: the lateness of shorter ones is due to the network."""
MOST = 20.0
"""Upper bound on the ratio of one sample."""
WEIGHT = 0.2
"""Of the newest sample in the moving average."""
HALVING_S = 1.0
"""Half-life of the excess above 1 without samples: a worker that was stopped for a moment is late with all prompts
that it had, and as fast as before with the next ones. One that stays slow is measured again all the time."""


class Slowdown:
    """A factor of at least 1 on a worker's predicted durations."""

    def __init__(self) -> None:
        """Start at 1."""
        self._excess = 0.0
        self._at_s = 0.0

    def factor(self, now_s: float) -> float:
        """The current factor."""
        return 1.0 + self._excess * 0.5 ** ((now_s - self._at_s) / HALVING_S)

    def learn(self, now_s: float, placed_s: float, end_s: float) -> None:
        """Add a sample: a prompt placed at ``placed_s`` and predicted to end at ``end_s`` ended now."""
        late = min((now_s - placed_s) / max(end_s - placed_s, SHORTEST_S), MOST)
        excess = self.factor(now_s) - 1.0
        self._excess = excess + WEIGHT * (max(late - 1.0, 0.0) - excess)
        self._at_s = now_s
