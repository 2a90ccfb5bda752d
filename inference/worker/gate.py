"""The gate: how many prompt tokens may be computed now, so that training never waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from weft.conf.timer_slack import USUAL_S, set_timer_slack
from weft.inference.board.common_bubbles import Opening, opening
from weft.inference.board.reader import BoardReader
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.worker.status import WorkerStatus

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16
"""Smaller grants are made only for what is left of a prompt: a step's fixed cost outweighs them."""
TRIAL_S, LONGEST_TRIAL_S = 0.5, 30.0
"""Shortest and longest pause of `Trials`."""
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
        self._trials = Trials()
        self._warm = False
        self.why_not = ""
        """Why a board's writer is not alive, as the last `grant` found it; empty if all are."""

    def grant(self, wanted: int, context: int) -> tuple[int, Opening | None]:
        """Tokens that are predicted to be through before the bubble closes less the guard; 0 if none.

        Args:
            wanted: tokens that could be computed now.
            context: tokens that the first of them attend to.
        """
        self._trials.under_way = False
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
        if not self._may_try(found, now_s):
            return 0, found
        self._trials.under_way = True
        return min(wanted, LEAST_TOKENS), found

    def _may_try(self, found: Opening, now_s: float) -> bool:
        pause_s = TRIAL_S if self.cost.steps < TRUSTED else self._trials.pause_s
        left_s = found.closes_s - now_s
        return (
            now_s - self.last_end_s >= pause_s
            and left_s >= FRESH * (found.closes_s - found.opened_s)
            and left_s > 2 * self.guard_s
        )

    def ended(self, start_s: float, end_s: float, tokens: int, context: float) -> float:
        """Learn from a step; returns the seconds by which it ran into training's time, 0.0 if it did not.

        They count from the first moment of the step at which a rank computed, whether it still does
        or has gone on to its next bubble meanwhile. A process's first step is nothing to learn from:
        it loads and allocates what later ones find.
        """
        if self._warm:
            self.cost.observe(tokens, context, max(0.0, start_s - self.last_end_s), end_s - start_s)
        self._warm = True
        self.last_end_s = end_s
        met_s = [board.busy_from(start_s, end_s) for board in self.boards]
        late_s = max((end_s - since_s for since_s in met_s if since_s is not None), default=0.0)
        self._trials.ended(late_s)
        return late_s


class Trials:
    """How long nothing may have been granted before a few tokens are tried all the same.

    Costs that are believed too high would never be corrected otherwise: a few steps that the host held up
    are enough for the cost model to find every bubble too short. A trial that ends in its bubble
    cost training nothing and halves the pause; one that was late doubles it.

    Attributes:
        pause_s: in seconds.
        under_way: whether what was granted last is a trial.
    """

    def __init__(self) -> None:
        """As if the last had ended well."""
        self.pause_s = TRIAL_S
        self.under_way = False

    def ended(self, late_s: float) -> None:
        """A step has ended, ``late_s`` after training began to compute; 0.0 if before."""
        if self.under_way:
            self.pause_s = min(2 * self.pause_s, LONGEST_TRIAL_S) if late_s else max(self.pause_s / 2, TRIAL_S)
        self.under_way = False


class Waker:
    """A thread that calls back when a bubble opens while there is work, and every `period_s` besides.

    It sleeps on the first board's bell; bubbles of a group of ranks open with any of them, so
    with several boards it also looks every few milliseconds. Without it nothing would be computed
    any more, so it goes on whatever it meets, and is started again if it has ended all the same.
    """

    def __init__(
        self, gate: Gate, wake: Callable[[], None], *, period_s: float, status: WorkerStatus | None = None
    ) -> None:
        """Start; ``wake`` is called on the waker's thread and must not block.

        Args:
            period_s: also wake this often while armed, for chores outside of bubbles.
            status: where it says that it lives.
        """
        self._gate = gate
        self._wake = wake
        self.period_s = period_s
        self._status = status or WorkerStatus(None)
        self._armed = threading.Event()
        self._told: Opening | None = None
        self._told_s = 0.0
        self._start()

    def arm(self, has_work: bool) -> None:
        """Say whether there is anything to wake for."""
        self._status.arm(has_work)
        if not has_work:
            self._armed.clear()
            return
        self._armed.set()
        if not self._thread.is_alive():
            logger.error("the thread that waits for bubbles has ended; starting another")
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="weft-waker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        set_timer_slack(USUAL_S)
        while True:
            self._armed.wait()
            try:
                self._look()
            except Exception:
                logger.exception("a look at the boards failed; again in %g s", LOOK_AGAIN_S)
                time.sleep(LOOK_AGAIN_S)

    def _look(self) -> None:
        pause_s = LOOK_AGAIN_S if len(self._gate.boards) == 1 else 0.005
        states = [board.state() for board in self._gate.boards]
        found, now_s = opening(states), states[0].now_s
        new = found is not None and (self._told is None or found.opened_s != self._told.opened_s)
        if new or now_s - self._told_s >= self.period_s:
            self._told, self._told_s = found if new else self._told, now_s
            self._status.woke()
            self._wake()
        self._status.looked()
        self._gate.boards[0].wait(states[0], min(pause_s, self.period_s))
