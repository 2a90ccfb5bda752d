"""What evaluations have said so far: the best of them, and how long ago it was. Part of each checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Evaluations:
    """The losses of a run's evaluations, summed up as far as decisions rest on them."""

    best_loss: float | None = None
    """Lowest loss; None before the first evaluation."""
    best_step: int = 0
    """Step after which it was measured."""
    without_gain: int = 0
    """Evaluations since the last one that was lower by more than the threshold."""

    def add(self, step: int, loss: float, *, threshold: float = 0.0) -> bool:
        """Take note of an evaluation; returns whether it is the best.

        Args:
            threshold: what a loss has to be lower by to start patience anew.
        """
        gained = self.best_loss is None or loss < self.best_loss - threshold
        best = self.best_loss is None or loss < self.best_loss
        self.without_gain = 0 if gained else self.without_gain + 1
        if best and loss == loss:  # NaN is no loss to beat
            self.best_loss, self.best_step = loss, step
            return True
        return False
