"""The best evaluation so far and how long ago it was; saved with each checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Evaluations:
    """Summary of evaluation losses, as needed for early stopping and the best checkpoint."""

    best_loss: float | None = None
    """Lowest loss, or None before the first evaluation."""
    best_step: int = 0
    """Step after which the lowest loss was measured."""
    without_gain: int = 0
    """Evaluations since the last improvement by more than the threshold."""

    last_step: int = 0
    """Step of the last evaluation; one that a signal has left out comes when the run is resumed."""

    def add(self, step: int, loss: float, *, threshold: float = 0.0) -> bool:
        """Record an evaluation and return whether it is the best so far.

        Args:
            threshold: least improvement that resets ``without_gain``.
        """
        self.last_step = step
        gained = self.best_loss is None or loss < self.best_loss - threshold
        best = self.best_loss is None or loss < self.best_loss
        self.without_gain = 0 if gained else self.without_gain + 1
        if best and loss == loss:  # NaN is never the best
            self.best_loss, self.best_step = loss, step
            return True
        return False
