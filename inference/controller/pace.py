"""How much later than predicted a worker's answers come, of late."""

from __future__ import annotations

SHORTEST_S = 0.1
"""What was predicted to take less counts as this long: its lateness is the network's."""
MOST = 20.0
"""Largest factor that one answer counts with."""
WEIGHT = 0.2
"""Of the newest answer."""
HALVING_S = 30.0
"""In which what is above 1 halves while no answer comes: a worker that was slow and gets no prompts
for it would never be seen to be fast again."""


class Pace:
    """A factor of at least 1 on the time that a worker is predicted to take."""

    def __init__(self) -> None:
        """As predicted, until it is known better."""
        self._excess = 0.0
        self._at_s = 0.0

    def factor(self, now_s: float) -> float:
        """What to multiply a prediction with now."""
        return 1.0 + self._excess * 0.5 ** ((now_s - self._at_s) / HALVING_S)

    def learn(self, now_s: float, placed_s: float, end_s: float) -> None:
        """A prompt that was to run from ``placed_s`` to ``end_s`` has ended now."""
        late = min((now_s - placed_s) / max(end_s - placed_s, SHORTEST_S), MOST)
        excess = self.factor(now_s) - 1.0
        self._excess = excess + WEIGHT * (max(late - 1.0, 0.0) - excess)
        self._at_s = now_s
