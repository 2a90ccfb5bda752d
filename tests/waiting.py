"""Waits of tests, which fail after a time limit."""

import time


def until(condition, timeout_s=60.0, *, pause_s=0.02, explain=lambda: "waited in vain"):
    """Return the first true value of ``condition``; after the limit fail with what ``explain`` returns."""
    limit = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < limit, explain()
        time.sleep(pause_s)
    return found
