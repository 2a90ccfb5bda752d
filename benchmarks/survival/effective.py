"""How much of a run's time is training, with a fault every so many steps, and whether it trains the same."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic

from benchmarks.survival.faults import HOSTS_AND_WATCHERS, ONE_RANK
from benchmarks.survival.outcome import Survival
from benchmarks.survival.reference import Undisturbed, difference
from benchmarks.survival.session import inflict, running
from benchmarks.survival.sitecustomize import PAD

GOAL = 0.99
"""Least share of the time."""
HOUR_S = 3600.0
_OTHERS = ("SIGSTOP half", "bit flipped", "wall clocks", "garbage")
"""What needs no restart, or goes back to storage."""
DRAWN = tuple(fault for fault in (*ONE_RANK, *HOSTS_AND_WATCHERS) if not any(text in fault.name for text in _OTHERS))


@dataclass
class Effective:
    """A run with faults.

    Attributes:
        outcomes: of the faults.
        steps: that were trained.
        step_s: that a usual one takes.
        total_s: from the end of the first to the end of the last, with everything.
        difference: of the losses from those of an undisturbed run; see `Survival`.
    """

    outcomes: list[Survival]
    steps: int = 0
    step_s: float = 0.0
    total_s: float = 0.0
    difference: float | None = None

    @property
    def share(self) -> float:
        """Of the time that steps without faults would have taken."""
        return (self.steps - 1) * self.step_s / self.total_s

    @property
    def lost_s(self) -> float:
        """By a fault, on average: until it is noticed, the restart, and steps that are trained again."""
        return (self.total_s - (self.steps - 1) * self.step_s) / max(1, len(self.outcomes))

    @property
    def again(self) -> float:
        """Steps that are trained again after a fault, on average, with half of the one under way where ranks stop."""
        stopped = sum(outcome.named_s is not None for outcome in self.outcomes)
        return (sum(outcome.lost or 0 for outcome in self.outcomes) + stopped / 2) / max(1, len(self.outcomes))

    @property
    def every(self) -> float:
        """Steps for each fault."""
        return self.steps / max(1, len(self.outcomes))

    def least_step_s(self, share: float) -> float | None:
        """Length of steps with which so many faults would leave such a share; computed, None if none does."""
        affordable = self.every * (1 - share) / share - self.again
        return (self.lost_s - self.again * self.step_s) / affordable if affordable > 0 else None

    def computed_share(self, between_s: float) -> float:
        """What the share would be with a fault every so many seconds of training; computed, not measured."""
        return between_s / (between_s + self.lost_s)

    @property
    def rows(self) -> list[dict[str, str]]:
        """For a table."""
        least_step_s = self.least_step_s(GOAL)
        same = (
            "not compared"
            if self.difference is None
            else "yes"
            if not self.difference
            else f"NO: {self.difference:.1g}"
        )
        return [
            {"": "steps, faults", "found": f"{self.steps}, {len(self.outcomes)}"},
            {"": "a usual step", "found": f"{self.step_s:.3f} s"},
            {"": "the whole run", "found": f"{self.total_s:.1f} s"},
            {"": "a fault takes", "found": f"{self.lost_s:.1f} s"},
            {"": "of that, trained again, with half of a step under way", "found": f"{self.again:.1f} steps"},
            {"": "effective training time", "found": f"{self.share:.1%}"},
            {"": "every loss that of an undisturbed run", "found": same},
            {"": "computed: with a fault an hour", "found": f"{self.computed_share(HOUR_S):.2%}"},
            {"": "computed: with a fault a day", "found": f"{self.computed_share(24 * HOUR_S):.3%}"},
            {
                "": f"computed: {GOAL:.0%} with a fault every {self.every:.0f} steps takes steps of",
                "found": "no length reaches it" if least_step_s is None else f"{least_step_s:.1f} s or more",
            },
        ]


def measure(
    folder: Path,
    settings: Sequence[str],
    *,
    steps: int,
    every: int,
    pad_s: float,
    seed: int,
    tell: Callable[[Survival], None],
) -> Effective:
    """Train so many steps, with a fault at a random one of every so many.

    Args:
        pad_s: seconds by which steps are longer than a tiny model's.
        tell: is told what became of each fault.
    """
    drawn = random.Random(seed)
    found = Effective([])
    os.environ[PAD] = str(pad_s)
    try:
        with running(folder / "faults", settings) as run:
            run.wait_for_step(1, timeout_s=300.0)
            begun, step_s = monotonic(), []
            for window in range(1, max(1, steps // every)):
                run.wait_for_step(window * every + drawn.randrange(every // 2), timeout_s=60.0 + every * 20.0)
                fault = drawn.choice(DRAWN)
                outcome = Survival(fault.name)
                found.outcomes.append(outcome)
                try:
                    inflict(run, fault, outcome)
                except RuntimeError as error:
                    outcome.note = str(error).splitlines()[0]
                    print(error, file=sys.stderr)
                tell(outcome)
                if outcome.note:
                    break
            else:
                run.wait_for_step(steps, timeout_s=60.0 + every * 20.0)
            found.total_s = monotonic() - begun
            step_s = list(run.step_seconds().values())
            losses = {step: loss for step, loss in run.losses().items() if step <= steps}
            found.steps, found.step_s = max(losses), median(step_s)
    finally:
        del os.environ[PAD]
    reference = Undisturbed(folder / "undisturbed", settings, stages=4)
    try:
        found.difference = difference(losses, reference.losses(found.steps))
    except RuntimeError as error:
        print(error, file=sys.stderr)
    finally:
        reference.close()
    return found
