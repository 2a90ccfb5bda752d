"""Timer slack: how late Linux may end a thread's timed waits, so as to gather several wake-ups into one."""

from __future__ import annotations

import ctypes

USUAL_S = 5e-5
"""Of a process that nobody has given another."""
_PR_SET_TIMERSLACK = 29
_LIBC = ctypes.CDLL(None)  # loaded before a fork: the child should call, and nothing more


def set_timer_slack(seconds: float) -> None:
    """Of this thread, and of the threads and processes that it starts from now on; at least a nanosecond.

    Waits that something else ends are as prompt as ever.
    """
    _LIBC.prctl(_PR_SET_TIMERSLACK, max(1, round(seconds * 1e9)))
