"""The gate: how many prompt tokens may be computed now, so that training never waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from weft.conf.timer_slack import USUAL_S, set_timer_slack
from weft.inference.board_reader import BoardReader
from weft.inference.common_bubbles import Opening, opening
from weft.inference.prefill_cost import TRUSTED, PrefillCost

LEAST_TOKENS = 16
"""Smaller grants are made only for what is left of a prompt: a step's fixed cost outweighs them."""
PROBE_AFTER_S, PROBE_AGAIN_S = 0.5, 30.0
"""How long nothing may have been granted before a few tokens are tried all the same: while the
cost model has hardly learnt, and after. Costs that are believed too high would never be corrected."""
FRESH = 0.8
"""Share of a bubble that must be left for such a trial."""
LOOK_AGAIN_S = 0.25
"""Longest sleep of the waker: how late a board that comes, goes or dies is noticed."""


class Gate:
    """Grants tokens inside bubbles, by the boards of the ranks whose devices the worker uses."""

    def __init__(self, boards: Sequence[BoardReader], cost: PrefillCost, *, guard_s: float) -> None:
        """Watch ``boards``.

        Args:
            cost: predicts a step; the worker teaches it.
            guard_s: kept free before training is expected back.

        Raises:
            ValueError: no boards.
        """
        if not boards:
            raise ValueError("boards=[]: nothing says when this worker may run; name the board of each rank it shares")
        self.boards = boards
        self.cost = cost
        self.guard_s = guard_s
        self.last_end_s = time.monotonic()
        self.why_not = ""
        """Why a board's writer is not alive, as the last `grant` found it; empty if all are."""

    def grant(self, wanted: int, context: int) -> tuple[int, Opening | None]:
        """Tokens that are predicted to be through before the bubble closes less the guard; 0 if none.

        Args:
            wanted: tokens that could be computed now.
            context: tokens that the first of them attend to.
        """
        states = [board.state() for board in self.boards]
        self.why_not = next((state.why_not for state in states if not state.alive), "")
        found = opening(states)
        if found is None or wanted <= 0:
            return 0, found
        now_s = time.monotonic()
        tokens = self.cost.tokens_within(
            found.closes_s - self.guard_s - now_s, context, max(0.0, now_s - self.last_end_s), wanted
        )
        if tokens >= min(wanted, LEAST_TOKENS):
            return tokens, found
        return (min(wanted, LEAST_TOKENS) if self._may_probe(found, now_s) else 0), found

    def _may_probe(self, found: Opening, now_s: float) -> bool:
        pause_s = PROBE_AFTER_S if self.cost.steps < TRUSTED else PROBE_AGAIN_S
        left_s = found.closes_s - now_s
        return (
            now_s - self.last_end_s >= pause_s
            and left_s >= FRESH * (found.closes_s - found.opened_s)
            and left_s > 2 * self.guard_s
        )

    def ended(self, start_s: float, end_s: float, tokens: int, context: float) -> float:
        """Learn from a step; returns the seconds by which it ran into training's time, 0.0 if it did not."""
        self.cost.observe(tokens, context, max(0.0, start_s - self.last_end_s), end_s - start_s)
        self.last_end_s = end_s
        busy_s = [state.busy_since_s for state in (board.state() for board in self.boards) if state.busy_since_s]
        return max((end_s - since_s for since_s in busy_s if since_s < end_s), default=0.0)


class Waker:
    """A thread that calls back when a bubble opens while there is work, and every `period_s` besides.

    It sleeps on the first board's bell; bubbles of a group of ranks open with any of them, so
    with several boards it also looks every few milliseconds.
    """

    def __init__(self, gate: Gate, wake: Callable[[], None], *, period_s: float) -> None:
        """Start; ``wake`` is called on the waker's thread and must not block.

        Args:
            period_s: also wake this often while armed, for chores outside of bubbles.
        """
        self._gate = gate
        self._wake = wake
        self.period_s = period_s
        self._armed = threading.Event()
        threading.Thread(target=self._run, name="weft-waker", daemon=True).start()

    def arm(self, has_work: bool) -> None:
        """Say whether there is anything to wake for."""
        if has_work and not self._armed.is_set():
            self._armed.set()
        elif not has_work and self._armed.is_set():
            self._armed.clear()

    def _run(self) -> None:
        set_timer_slack(USUAL_S)
        told: Opening | None = None
        told_s = 0.0
        pause_s = LOOK_AGAIN_S if len(self._gate.boards) == 1 else 0.005
        while True:
            self._armed.wait()
            states = [board.state() for board in self._gate.boards]
            found = opening(states)
            now_s = states[0].now_s
            if found is not None and (told is None or found.opened_s != told.opened_s):
                told, told_s = found, now_s
                self._wake()
            elif now_s - told_s >= self.period_s:
                told_s = now_s
                self._wake()
            self._gate.boards[0].wait(states[0], min(pause_s, self.period_s))
