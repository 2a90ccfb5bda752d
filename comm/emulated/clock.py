"""The clock of an emulated job: the host's, without the time that emulating the others takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep

from weft.conf.host.processes import set_timer_slack

WAKE_UP_S = 1e-4
"""Seconds by which a sleeper may wake up late without timer slack."""


class EmulatedClock:
    """Seconds since any moment. What the rank's own threads do counts, and `left_out` does not."""

    def __init__(self) -> None:
        self._left_out_s = 0.0
        self.twin_s = 0.0
        """Seconds inside `left_out` so far."""
        self.waited_s = 0.0
        """Seconds that the rank's own thread has waited so far, on this clock."""
        self._main = threading.get_ident()

    def now(self) -> float:
        """Seconds."""
        return perf_counter() - self._left_out_s

    def until(self, at_s: float) -> None:
        """Wait until `now` is ``at_s``.

        The rank's own thread watches the clock at the end, to within microseconds; others sleep through, for
        watching would take the interpreter from it.
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
        """Subtract seconds from the duration of the last work; a negative number adds them."""
        self._left_out_s += seconds

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Exclude the time spent inside; call it on the rank's own thread."""
        begun = perf_counter()
        try:
            yield
        finally:
            took_s = perf_counter() - begun
            self.leave_out(took_s)
            self.twin_s += took_s
