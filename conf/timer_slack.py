"""Timer slack: how late Linux may end a thread's timed waits, in order to coalesce wake-ups."""

from __future__ import annotations

import ctypes

USUAL_S = 5e-5
"""Linux's default for a process."""
_PR_SET_TIMERSLACK = 29
_LIBC = ctypes.CDLL(None)  # loaded before a fork: the child should call, and nothing more


def set_timer_slack(seconds: float) -> None:
    """Set the slack of this thread, and of threads and processes that it starts later; at least 1 ns.

    Only timed waits change: a wait that an event ends stays as prompt as before.
    """
    _LIBC.prctl(_PR_SET_TIMERSLACK, max(1, round(seconds * 1e9)))
