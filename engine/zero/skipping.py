"""Skipping of steps with bad gradients, up to a number of consecutive steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.engine.zero.finite import NOWHERE, NonFiniteError, explanation
from weft.engine.zero.origin import Source

WINDOW = 32
"""Number of good steps whose norms define a spike. Spikes are detected only once there are as many."""


ADAM = (torch.optim.Adam, torch.optim.AdamW)


class SkippedStep(NamedTuple):
    """A step whose gradient was dropped.

    Attributes:
        step: counted from 1.
        norm: 2-norm of its gradient, or NaN if the loss was not finite.
        source: where non-finite numbers first appeared.
    """

    step: int
    norm: float
    source: Source = NOWHERE


class SkippedTooOften(NonFiniteError):
    """The allowed number of consecutive steps was skipped. Raised on every rank, between steps.

    Weights and the optimiser's state are those before the first skipped step.

    Attributes:
        summary: the message without the remedy.
    """

    def __init__(self, steps: tuple[SkippedStep, ...]) -> None:
        self.steps = steps
        norms = ", ".join(f"{step.norm:.4g}" for step in steps)
        self.summary = (
            f"step {steps[-1].step}: the last {len(steps)} steps were skipped, because the norms of their gradients "
            f"were {norms}"
        )
        ranks = set.intersection(*(set(step.source.ranks) for step in steps))
        forwards = {step.source.forward for step in steps}
        forward, first = forwards.pop() if len(forwards) == 1 else -1, steps[0].source
        source = Source(tuple(sorted(ranks)), forward, first.weights if ranks else (), first.updated)
        super().__init__(f"{self.summary}: {explanation(source)}", source)


class Skips:
    """Classifies each step by the norm of its gradient, with the same result on every rank."""

    def __init__(self, most: int = 0, spike: float = 0.0) -> None:
        """Create the rule.

        Args:
            most: allowed number of consecutive bad steps. 0 skips none.
            spike: largest ratio of a good step's norm to the median of the last `WINDOW`. 0 accepts any finite norm.
        """
        self.most = most
        self.spike = spike
        self._good: deque[float] = deque(maxlen=WINDOW)
        self._in_row: list[SkippedStep] = []

    @property
    def norms(self) -> list[float]:
        """Norms of the last good steps. Checkpoints store them, so that a resumed run classifies steps equally."""
        return list(self._good)

    def judge(self, step: int, norm: float, origin: Callable[[], Source] = Source) -> bool:
        """Return True if a step is good, or False if it must be skipped.

        Args:
            origin: returns the source of a norm that is not finite. Called on all ranks or on none.
        """
        good = isfinite(norm) and norm <= self.largest
        if good:
            self._in_row.clear()
            self._good.append(norm)
        else:
            self._in_row.append(SkippedStep(step, norm, NOWHERE if isfinite(norm) else origin()))
        return good

    def check(self) -> None:
        """Raise an error if too many consecutive steps were skipped.

        Raises:
            SkippedTooOften: the last ``most`` steps were all skipped.
        """
        if self.most and len(self._in_row) >= self.most:
            raise SkippedTooOften(tuple(self._in_row))

    def restore(self, norms: list[float]) -> None:
        """Reset to the state after good steps with these norms."""
        self._in_row.clear()
        self._good.clear()
        self._good.extend(norms)

    @property
    def largest(self) -> float:
        """Largest norm of the next step that is no spike."""
        return self.spike * median(self._good) if self.spike and len(self._good) == WINDOW else inf


def fuse(optimizer: Optimizer) -> None:
    """Let torch's Adam update by its fused kernel, for `skips_on_device`, unless its settings choose another."""
    groups = optimizer.param_groups
    if type(optimizer) in ADAM and all(group["foreach"] is None and group["fused"] is None for group in groups):
        for group in (optimizer.defaults, *groups):
            group["fused"] = True


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Return True if an update of ``optimizer`` can be skipped on ``device`` without the host knowing it.

    torch's fused Adam can. Fused SGD cannot: a first step that is skipped leaves its momentum uninitialised.
    """
    is_fused = type(optimizer) in ADAM and all(group["fused"] for group in optimizer.param_groups)
    return is_fused and device.type == "cuda"


@contextmanager
def skipping(optimizer: Any, skip: Tensor | None) -> Iterator[None]:
    """Let updates change nothing if ``skip`` is 1.0, by the attribute that torch's `GradScaler` sets."""
    if skip is None:
        yield
        return
    optimizer.found_inf = skip
    try:
        yield
    finally:
        del optimizer.found_inf
