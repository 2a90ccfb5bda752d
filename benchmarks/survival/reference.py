"""The losses of an undisturbed run, computed on demand."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from benchmarks.survival.hosts import NUM_RANKS, OneMachine
from benchmarks.survival.run import SupervisedRun

_DAY_S = 86400
PLAIN = (
    "cluster.master_port=0",
    "checkpoint.every=0",
    "checkpoint.memory_every=0",
    f"comm.timeout_s={_DAY_S}",
    f"comm.deadline_s={_DAY_S}",
    f"supervise.silence_s={_DAY_S}",
    f"supervise.least_deadline_s={_DAY_S}",
    f"supervise.setup_deadline_s={_DAY_S}",
)
"""Settings without checkpoints, whose timeouts allow a run to be stopped for a day."""


class Undisturbed:
    """A run on one host with given settings; between queries it is stopped, and uses no processor time."""

    def __init__(
        self, folder: Path, settings: Sequence[str], *, stages: int, left_out: tuple[int, int] | None = None
    ) -> None:
        """Create a run, which starts at the first query.

        Args:
            stages: pipeline ranks, half of them at each site.
            left_out: the first sequence that is left out, and the first one after these.
        """
        self._folder, self._settings, self._stages, self._left_out = folder, settings, stages, left_out
        self._run: SupervisedRun | None = None

    def losses(self, until: int) -> dict[int, float]:
        """Return the losses by step, at least up to step ``until``.

        Raises:
            RuntimeError: the run has ended, or does not reach that step in time.
        """
        if self._run is None:
            self._folder.mkdir(parents=True)
            self._run = SupervisedRun(self._folder, [*self._settings, *PLAIN], OneMachine(stages=self._stages))
            if self._left_out is not None:
                for rank in range(NUM_RANKS):
                    self._run.order(rank, "leave_out", first=self._left_out[0], after=self._left_out[1])
        elif self._run.step < until:
            self._run.signal_all(signal.SIGCONT)
        if self._run.step < until:
            self._run.wait_for_step(until, timeout_s=300.0 + 5.0 * until)
            self._run.signal_all(signal.SIGSTOP)
        return self._run.losses()

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.signal_all(signal.SIGCONT)
            self._run.close()


def difference(found: Mapping[int, float | None], expected: Mapping[int, float | None]) -> float | None:
    """Return the largest relative difference of a loss, 0 if all are equal to the last digit, None without losses.

    Raises:
        KeyError: a step is not expected.
    """
    return max((_difference(loss, expected[step]) for step, loss in found.items()), default=None)


def _difference(loss: float | None, expected: float | None) -> float:
    if loss == expected:
        return 0.0
    return inf if loss is None or expected is None else abs(loss - expected) / abs(expected)
