"""The clock of an emulated job: the host's clock, minus the time that emulating the other ranks takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep

from weft.conf.host.processes import set_timer_slack

WAKE_UP_S = 1e-4
"""Seconds by which a sleeper may wake up late without timer slack."""


class EmulatedClock:
    """A clock in seconds since an arbitrary moment, without the time inside `left_out` blocks."""

    def __init__(self) -> None:
        self._left_out_s = 0.0
        self.twin_s = 0.0
        """Seconds inside `left_out` so far."""
        self.waited_s = 0.0
        """Seconds that the rank's own thread has waited so far, on this clock."""
        self._main = threading.get_ident()

    def now(self) -> float:
        """Return the current time of this clock in seconds."""
        return perf_counter() - self._left_out_s

    def until(self, at_s: float) -> None:
        """Wait until `now` is ``at_s``.

        The rank's own thread polls the clock at the end, for microsecond precision. Other threads only sleep, because
        polling would take the interpreter lock from it.
        """
        main = threading.get_ident() == self._main
        slack = WAKE_UP_S if main else 0.0
        if main:
            self.waited_s += max(0.0, at_s - self.now())
        set_timer_slack(0.0)
        while (left := at_s - slack - self.now()) > 0:
            sleep(left)
        while self.now() < at_s:
            pass

    def leave_out(self, seconds: float) -> None:
        """Subtract ``seconds`` from this clock, and so from the last measured work. A negative number adds them."""
        self._left_out_s += seconds

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Exclude the duration of the block from this clock. Call it on the rank's own thread."""
        begun = perf_counter()
        try:
            yield
        finally:
            took_s = perf_counter() - begun
            self.leave_out(took_s)
            self.twin_s += took_s
