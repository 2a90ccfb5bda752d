"""Which steps are skipped because their numbers are bad, and when that has gone on for too long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import isfinite
from statistics import median
from typing import NamedTuple

from weft.engine.zero.finite import NOWHERE, NonFiniteError, explanation
from weft.engine.zero.origin import Source

WINDOW = 32
"""Norms of good steps that a spike is judged by; until there are as many, none is looked for."""


class SkippedStep(NamedTuple):
    """A step whose gradient was dropped.

    Attributes:
        step: counted from 1.
        norm: 2-norm of its gradient; NaN, too, if the loss alone was not finite.
        source: where numbers that are not finite first appeared.
    """

    step: int
    norm: float
    source: Source = NOWHERE


class SkippedTooOften(NonFiniteError):
    """As many steps in a row were skipped as are allowed; raised on every rank, between steps.

    Weights and the optimiser's state are as they were before the first of them.

    Attributes:
        steps: those that were skipped.
        summary: the message without what to do.
    """

    def __init__(self, steps: tuple[SkippedStep, ...]) -> None:
        """Name the ``steps``, of which there is at least one."""
        self.steps = steps
        norms = ", ".join(f"{step.norm:.4g}" for step in steps)
        self.summary = (
            f"step {steps[-1].step}: the last {len(steps)} steps were skipped, because the norms of their gradients "
            f"were {norms}"
        )
        ranks = set.intersection(*(set(step.source.ranks) for step in steps))
        forwards = {step.source.forward for step in steps}
        source = Source(tuple(sorted(ranks)), forwards.pop() if len(forwards) == 1 else -1)
        super().__init__(f"{self.summary}: {explanation(source)}", source)


class Skips:
    """Judges each step by the norm of its gradient, alike on every rank, since the norm is."""

    def __init__(self, most: int = 0, spike: float = 0.0) -> None:
        """Set the rule.

        Args:
            most: bad steps in a row. 0 skips none.
            spike: a norm of a good step is at most this many times the median of the last `WINDOW`; 0
                lets any finite norm pass.
        """
        self.most = most
        self.spike = spike
        self._good: deque[float] = deque(maxlen=WINDOW)
        self._in_row: list[SkippedStep] = []

    @property
    def norms(self) -> list[float]:
        """Norms of the last good steps, which a checkpoint keeps so that a resumed run judges alike."""
        return list(self._good)

    def judge(self, step: int, norm: float, origin: Callable[[], Source] = Source) -> bool:
        """True if a step is good; one that is not is to be skipped.

        Args:
            origin: returns where a norm that is not finite comes from; called on all ranks alike.
        """
        good = isfinite(norm) and not self._is_spike(norm)
        if good:
            self._in_row.clear()
            self._good.append(norm)
        else:
            self._in_row.append(SkippedStep(step, norm, NOWHERE if isfinite(norm) else origin()))
        return good

    def check(self) -> None:
        """Say whether it may go on like this.

        Raises:
            SkippedTooOften: the last ``most`` steps were all skipped.
        """
        if self.most and len(self._in_row) >= self.most:
            raise SkippedTooOften(tuple(self._in_row))

    def restore(self, norms: list[float]) -> None:
        """Begin anew after steps with these norms."""
        self._in_row.clear()
        self._good.clear()
        self._good.extend(norms)

    def _is_spike(self, norm: float) -> bool:
        return bool(self.spike) and len(self._good) == WINDOW and norm > self.spike * median(self._good)
