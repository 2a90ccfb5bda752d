"""The gate of one pipeline stage of a worker: holds a chunk back until the stage's own rank is idle for long enough."""

from __future__ import annotations

import logging
import time

from weft.inference.board.reader import BoardReader, BoardState

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Seconds after which a chunk that fits into no bubble begins one of the longest. It cannot be cut any more, and all
others wait behind it, so training waits for the rest of it at most this often."""
MIN_REMAINING = 0.8
"""Share of the longest bubble that must remain for such a chunk."""
HORIZON_S = 10.0
"""Time ahead in which the longest bubble is searched."""
CHECK_S = 0.25
"""Longest sleep, in seconds: the latency of noticing a board that appears, disappears or dies."""


class StageGate:
    """Blocks a stage while its rank trains, or is about to."""

    def __init__(self, board: BoardReader, *, guard_s: float) -> None:
        """Create a gate by the rank's ``board``.

        Args:
            guard_s: seconds kept free before training is predicted to continue.
        """
        self._board, self._guard_s = board, guard_s

    def wait(self, seconds: float) -> float:
        """Block until a chunk that is predicted to take ``seconds`` may begin. Return the time waited in seconds.

        It fits into the rank's current bubble, has waited for long (`PATIENCE_S`), or training has ended.
        """
        begun_s = time.monotonic()
        while not self._may_begin(state := self._board.state(), seconds, begun_s):
            self._board.wait(state, CHECK_S)  # each bubble that opens ends the wait
        return time.monotonic() - begun_s

    def _may_begin(self, state: BoardState, seconds: float, begun_s: float) -> bool:
        found = state.bubble
        if found is None:
            return not state.alive and self._board.ended
        left_s = found.closes_s - self._guard_s - state.now_s
        if left_s >= seconds:
            return True
        if state.now_s - begun_s < PATIENCE_S:
            return False
        longest_s = max(
            (end_s - start_s for start_s, end_s in self._board.upcoming(HORIZON_S, is_cautious=True)), default=0.0
        )
        if left_s < MIN_REMAINING * (longest_s - self._guard_s):
            return False
        logger.warning(
            "a chunk of %.0f ms fits into no bubble of %s, and begins one of %.0f ms after %.1f s",
            1e3 * seconds,
            self._board.path.name,
            1e3 * left_s,
            state.now_s - begun_s,
        )
        return True
