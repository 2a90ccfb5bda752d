"""The history of a run: evaluations, and the data that recent steps read, so that bad batches can be left out."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.zero import SkippedTooOften

MOST_TIMES = 3
"""Number of returns to a checkpoint that end the training if none of them got past the bad data."""
_REMEMBERED = 64
"""Number of steps whose positions in the data are stored. It is more than the steps that may be skipped in a row."""


class BadData:
    """Positions of the last steps in the data, and the number of returns to a checkpoint without progress."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self._beyond, self._times = 0, 0

    @property
    def last(self) -> tuple[int, int]:
        """Number of the last step that began, and of the sequences before it, over all replicas. (0, 0) before any
        step.
        """
        return next(reversed(self._before.items()), (0, 0))

    def begin(self, step: int, consumed: int) -> None:
        """Record the position in the data at which a step begins to read."""
        kept = [known for known in self._before if step - _REMEMBERED < known < step]
        self._before = {known: self._before[known] for known in kept} | {step: consumed}

    def of(self, error: SkippedTooOften, consumed: int) -> tuple[int, int]:
        """Return the range of sequences that skipped steps have read: the first one, and the one after the last.

        Args:
            consumed: number of sequences that have been read so far.
        """
        return self._before[error.steps[0].step], self._before.get(error.steps[-1].step + 1, consumed)

    def trained(self, read: int) -> None:
        """Record a step that was not skipped, and that began after ``read`` sequences."""
        if read >= self._beyond:
            self._times = 0

    def is_hopeless(self, after: int) -> bool:
        """Count a return to a checkpoint, which leaves out sequences before ``after``.

        Return True if it is the last allowed.
        """
        self._times += 1
        self._beyond = after
        return self._times >= MOST_TIMES


@dataclass
class Evaluations:
    """Summary of the evaluation losses, for early stopping and the best checkpoint."""

    best_loss: float | None = None
    """Lowest loss, or None before the first evaluation whose loss is not NaN."""
    best_step: int = 0
    """Step after which the lowest loss was measured."""
    without_gain: int = 0
    """Number of evaluations since the last improvement by more than the threshold."""

    last_step: int = 0
    """Step of the last evaluation. A resumed run catches up on an evaluation that a signal has prevented."""

    def add(self, step: int, loss: float, *, threshold: float = 0.0) -> bool:
        """Record an evaluation. Return True if its loss is the lowest so far.

        Args:
            threshold: the improvement must be larger than this to reset ``without_gain``.
        """
        self.last_step = step
        gained = self.best_loss is None or loss < self.best_loss - threshold
        best = self.best_loss is None or loss < self.best_loss
        self.without_gain = 0 if gained else self.without_gain + 1
        if best and loss == loss:  # NaN is never the best
            self.best_loss, self.best_step = loss, step
            return True
        return False
