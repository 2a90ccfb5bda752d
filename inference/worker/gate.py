"""The gate: grants as many prompt tokens as fit into the current bubble, so that training never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from weft.conf.host.processes import USUAL_S, set_timer_slack
from weft.inference.board.common_bubbles import Opening, opening
from weft.inference.board.reader import BoardReader
from weft.inference.placement.prefill_cost import GAPS_S, TRUSTED, PrefillCost, gap_class
from weft.inference.worker.status import BEAT_S, WorkerStatus

logger = logging.getLogger(__name__)

MIN_TOKENS = 16
"""Minimum grant, except for the rest of a prompt: below it a step's fixed cost dominates."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 2.0
"""Bounds of the pause of `Trials`: a late trial costs training a step at most this often, and predictions recover
within seconds of a slow period's end."""
MIN_REMAINING = 0.8
"""Share of a bubble that must remain for a trial, if no step has ended in it."""
MIN_STEPS = 2.0
"""Number of steps as long as the last one that must fit for a trial, if that step ended in the same bubble."""
CHECK_S = 0.25
"""Maximum sleep of the waker: the latency of noticing a board that appears, disappears or dies."""

Limit = Callable[[int, float, float], int]
"""Returns at most its first argument, a number of tokens, given the time now and that of the bubble's end."""
Span = tuple[float, float, float | None]
"""Begin and end of a step, in seconds of the monotonic clock, and its processor time or None."""


class Gate:
    """Grants tokens inside bubbles of the ranks whose devices the worker shares."""

    def __init__(self, boards: Sequence[BoardReader], cost: PrefillCost, *, guard_s: float) -> None:
        """Create a gate that grants by ``boards``.

        Args:
            cost: predicts the duration of a step; updated by `ended`.
            guard_s: seconds kept free before training is predicted to continue.

        Raises:
            ValueError: no boards.
        """
        if not boards:
            raise ValueError("boards=[]: name the board of each rank whose device this worker shares")
        self.boards = boards
        self.cost = cost
        self.guard_s = guard_s
        self.last_end_s = time.monotonic()
        self._last_s = 0.0
        self._class_end_s = [self.last_end_s] * (len(GAPS_S) + 1)
        """End of the last step of each class of idle time; predictions of a class improve with its own steps only."""
        self._trials = Trials()
        self._warm = False
        self.why_not = ""
        """Why a board's writer was not alive at the last `grant`, or empty if all were."""

    def grant(
        self, wanted: int, context: int, *, most: Limit | None = None, may_try: bool = True
    ) -> tuple[int, Opening | None]:
        """Return the number of tokens to compute now, and the current bubble.

        The tokens are predicted to finish before the bubble closes, minus the guard, or are a trial (`Trials`). The
        bubble is None if no common bubble is open.

        Args:
            wanted: the number of pending tokens.
            context: number of tokens that they attend to.
            most: limits the tokens further.
            may_try: False grants no trial.
        """
        self._trials.closes_s = 0.0
        states = [board.state() for board in self.boards]
        self.why_not = next((state.why_not for state in states if not state.alive), "")
        found = opening(states)
        if found is None or wanted <= 0:
            return 0, found
        now_s = time.monotonic()
        tokens = self.cost.tokens_within(
            found.closes_s - self.guard_s - now_s, context, max(0.0, now_s - self.last_end_s), wanted
        )
        if most is not None and tokens:
            tokens = most(tokens, now_s, found.closes_s)
        if tokens >= min(wanted, MIN_TOKENS):
            return tokens, found
        if not may_try or not self._may_try(found, now_s):
            return 0, found
        return min(wanted, self._trials.begin(now_s, found.closes_s)), found

    def predicted(self, context: int) -> Callable[[int, float], float]:
        """Return a function of tokens and begin that predicts a step after ``context`` tokens. See `chain.Seconds`."""
        return lambda tokens, at_s: self.cost.predict_s(tokens, context, max(0.0, at_s - self.last_end_s))

    def _may_try(self, found: Opening, now_s: float) -> bool:
        pause_s = MIN_PAUSE_S if self.cost.steps < TRUSTED else self._trials.pause_s
        last_s = min(self.last_end_s, self._class_end_s[gap_class(max(0.0, now_s - self.last_end_s))])
        left_s = found.closes_s - now_s
        needed_s = MIN_REMAINING * (found.closes_s - found.opened_s)
        if self.last_end_s > found.opened_s:
            needed_s = MIN_STEPS * self._last_s
        return now_s - last_s >= pause_s and left_s >= needed_s and left_s > 2 * self.guard_s

    def ended(
        self, start_s: float, end_s: float, tokens: int, context: float, computed_s: float | None = None
    ) -> float:
        """Learn from a step, and return the seconds by which it overlapped with training, or 0.0.

        The overlap counts from the first time during the step at which a rank computed, even if that
        rank has reached its next bubble meanwhile. The first step of a process is not used for
        learning, because it includes loading and allocation.

        Args:
            computed_s: seconds of the step in which the process was neither preempted nor stopped, or None if unknown.
        """
        gap_s = max(0.0, start_s - self.last_end_s)
        self._class_end_s[gap_class(gap_s)] = end_s
        self._last_s = end_s - start_s if computed_s is None else computed_s
        if self._warm:
            self.cost.observe(tokens, context, gap_s, self._last_s)
        self._warm = True
        self.last_end_s = end_s
        met_s = [board.busy_from(start_s, end_s) for board in self.boards]
        late_s = max((end_s - since_s for since_s in met_s if since_s is not None), default=0.0)
        self._trials.ended(start_s, end_s, late_s)
        return late_s


class Trials:
    """Trial grants, made when the cost model finds all bubbles too short, with exponential back-off.

    Otherwise overestimated costs would never be corrected. A few steps that the host delays can make every bubble seem
    too short. A trial that finishes in its bubble halves the pause; a late one doubles it. A trial that takes less than
    half of its bubble's remaining time doubles the tokens of the next one. So prompts make progress even if predictions
    stay too long because the host is busy.

    Attributes:
        pause_s: seconds without a grant before the next trial.
        tokens: number of tokens of the next trial, if it begins soon.
        closes_s: end of the bubble, if the last grant was a trial; otherwise 0.0.
    """

    def __init__(self) -> None:
        self.pause_s = MIN_PAUSE_S
        self.tokens = MIN_TOKENS
        self.closes_s = 0.0
        self._ended_s = 0.0

    def begin(self, now_s: float, closes_s: float) -> int:
        """Begin a trial in a bubble that ends at ``closes_s``, and return its number of tokens."""
        if now_s - self._ended_s > 2 * MAX_PAUSE_S:
            self.tokens = MIN_TOKENS
        self.closes_s = closes_s
        return self.tokens

    def ended(self, start_s: float, end_s: float, late_s: float) -> None:
        """Process the end of a step. It ended ``late_s`` after training continued, or 0.0 if before."""
        if late_s:
            self.tokens = MIN_TOKENS
        if self.closes_s:
            self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S) if late_s else max(self.pause_s / 2, MIN_PAUSE_S)
            if not late_s and end_s - start_s <= self.closes_s - end_s:
                self.tokens *= 2
            self._ended_s = end_s
        self.closes_s = 0.0


class Waker:
    """A thread that calls back when a bubble opens while there is work, and also every `period_s`.

    It blocks on the first board's futex. A common bubble may open with any rank, so with several boards it also polls
    every few milliseconds. The worker depends on it, so it survives exceptions, and is restarted if it dies.
    """

    def __init__(
        self, gate: Gate, wake: Callable[[], None], *, period_s: float, status: WorkerStatus | None = None
    ) -> None:
        """Start the thread. It calls ``wake``, which must not block.

        Args:
            period_s: interval in seconds of additional calls while armed, for chores outside of bubbles.
            status: publishes its liveness.
        """
        self._gate = gate
        self._wake = wake
        self.period_s = period_s
        self._status = status or WorkerStatus(None)
        self._armed = threading.Event()
        self._is_closed = False
        self._announced: Opening | None = None
        self._last_wake_s = 0.0
        self._start()

    def arm(self, has_work: bool) -> None:
        """Set whether there is work to wake for."""
        if not has_work:
            self._armed.clear()
            return
        self._armed.set()
        if not self._thread.is_alive():
            logger.error("the thread that waits for bubbles has died; restarting it")
            self._start()

    def close(self) -> None:
        """End the thread. The boards may be closed afterwards."""
        self._is_closed = True
        self._armed.set()
        self._thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="weft-waker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        set_timer_slack(USUAL_S)
        while not self._is_closed:
            is_armed = self._armed.wait(BEAT_S)
            self._status.checked()
            try:
                if is_armed and not self._is_closed:
                    self._check()
            except Exception:
                logger.exception("checking the boards failed; retrying in %g s", CHECK_S)
                time.sleep(CHECK_S)

    def _check(self) -> None:
        pause_s = CHECK_S if len(self._gate.boards) == 1 else 0.005
        states = [board.state() for board in self._gate.boards]
        found, now_s = opening(states), states[0].now_s
        new = found is not None and (self._announced is None or found.opened_s != self._announced.opened_s)
        if new or now_s - self._last_wake_s >= self.period_s:
            self._announced, self._last_wake_s = found if new else self._announced, now_s
            self._status.woke()
            self._wake()
        self._gate.boards[0].wait(states[0], min(pause_s, self.period_s))
