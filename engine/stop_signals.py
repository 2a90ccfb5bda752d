"""Signals to stop a rank: one ends training after the current step, a second one ends the process."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType

from weft.conf.host.threads import Thread

STOP = "WEFT_STOP"
"""Environment variable of a rank that starts while its run is being stopped: the number of the signal."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_S = 1.0
"""Seconds in which a second signal counts as the first: a terminal and a launcher often send one each."""
_END = bytes(1)
"""Byte that ends the thread. No signal has the number 0."""
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(SystemExit):
    """Training has ended before its last step because of a signal. The exit code is 128 plus the signal's number."""


class StopSignals:
    """Handling of SIGTERM and SIGINT as requests to stop, which training reads between two steps.

    A thread receives them, because the main thread may be waiting for another rank. Signals that the program
    ignores or handles itself are not changed. Outside the main thread nothing is changed.

    Attributes:
        number: number of the first signal, or 0 before it.
    """

    def __init__(self, deadline_s: float) -> None:
        """Create the handling. Signals change only when `open` is called.

        Args:
            deadline_s: seconds from the first signal after which the process ends whatever it does.
        """
        self.number = int(os.environ.get(STOP) or 0)
        self._deadline_s, self._deferred, self._first_at = deadline_s, False, monotonic()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def open(self) -> StopSignals:
        """Receive the signals from now on. Until `defer` is called, a signal ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            return self
        taken = [number for number in SIGNALS if signal.getsignal(number) in _DEFAULTS]
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writing, False)
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _noted) for number in taken}
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._release_in_child)
        self._thread = Thread(self._take, name="weft-signals")
        self._thread.start()
        return self

    def defer(self) -> None:
        """Treat signals as requests from now on. An earlier one ends the process only by its deadline."""
        self._deferred = True

    def close(self) -> None:
        """Restore the previous handling of signals."""
        if self._before:
            self._give_back()
            os.write(self._writing, _END)  # not by closing it, because forked children may have it open, too
            self._thread.join()
            os.close(self._writing)
            os.close(self._reading)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        signal.set_wakeup_fd(self._wakeup)

    def _block(self) -> None:
        """Block signals while a process forks, because a child initially shares this process's pipe."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _release_in_child(self) -> None:
        if self._before:
            self._give_back()
        self._unblock()

    def _take(self) -> None:
        while True:
            left_s = self._deadline_s - (monotonic() - self._first_at) if self.number else None
            ready, _, _ = select.select([self._reading], [], [], left_s if left_s is None else max(0.0, left_s))
            if not ready:
                text = f"checkpoint.signal_deadline_s={self._deadline_s:g} is over, and no checkpoint is whole"
                print(f"weft train: {text}", file=sys.stderr, flush=True)
                os._exit(128 + self.number)
            numbers = os.read(self._reading, 64)
            if _END in numbers:
                return None
            for number in numbers:
                if number in self._before:
                    self._note(number)

    def _note(self, number: int) -> None:
        if self.number and monotonic() - self._first_at > _SAME_S:
            os._exit(128 + number)
        if not self.number:
            self.number, self._first_at = number, monotonic()
            if not self._deferred:
                os._exit(128 + number)
            elif os.environ.get("RANK", "0") == "0" and "WEFT_PROGRESS" not in os.environ:  # a driver prints otherwise
                text = "ending after the running step, with a checkpoint; once more to end at once"
                print(f"weft train: {signal.Signals(number).name}: {text}", file=sys.stderr, flush=True)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing. The interpreter writes the signal's number to the pipe before it calls this."""
