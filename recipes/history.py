"""The history of a run: its evaluations, and the data of each step, which is needed to leave out bad batches."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.zero import SkippedTooOften

MOST_TIMES = 3
"""Number of returns to a checkpoint without progress beyond the bad data; the last ends the training."""
_REMEMBERED = 64
"""Number of steps whose positions in the data are remembered: more than may be skipped in a row."""


class BadData:
    """Positions of the last steps in the data, and the number of returns without progress."""

    def __init__(self) -> None:
        """Begin, with no step."""
        self._before: dict[int, int] = {}
        self._beyond, self._times = 0, 0

    @property
    def last(self) -> tuple[int, int]:
        """The last step that began, and the number of sequences before it, over all replicas."""
        return next(reversed(self._before.items()), (0, 0))

    def begin(self, step: int, consumed: int) -> None:
        """Note where in the data a step begins to read."""
        kept = [known for known in self._before if step - _REMEMBERED < known < step]
        self._before = {known: self._before[known] for known in kept} | {step: consumed}

    def of(self, error: SkippedTooOften, consumed: int) -> tuple[int, int]:
        """Return the sequences that skipped steps have read: the first in the global order, and the one after the last.

        Args:
            consumed: sequences that were read by now.
        """
        return self._before[error.steps[0].step], self._before.get(error.steps[-1].step + 1, consumed)

    def trained(self, read: int) -> None:
        """Note a step that was not skipped, which had ``read`` sequences before it."""
        if read >= self._beyond:
            self._times = 0

    def is_hopeless(self, after: int) -> bool:
        """True if it does not help to leave out more, now up to the sequence before ``after``; this time is counted."""
        self._times += 1
        self._beyond = after
        return self._times >= MOST_TIMES


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
