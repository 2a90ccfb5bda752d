"""The gate of a worker whose model is a pipeline over several ranks: grants chunks that fit a bubble of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from weft.inference.board.common_bubbles import Opening
from weft.inference.placement.chain import HOP_S, Stage, most_tokens, spans_of
from weft.inference.worker.gate import Gate, Span

HORIZON_S = 10.0
"""Time ahead in which bubbles of later stages are searched."""


class ChainGate:
    """Grants chunks to a pipeline, with a `Gate` for each stage. Chunks overlap in it."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self.gates = gates
        self._in_flight: deque[tuple[int, float, list[float]]] = deque()
        """Tokens, context and the predicted end in each stage."""
        self.predicted_s: list[float] | None = None
        """Predicted seconds in each stage of the chunk that `began` last."""

    @property
    def why_not(self) -> str:
        """Why a board's writer was not alive at the last `grant`, or empty if all were."""
        return next((gate.why_not for gate in self.gates if gate.why_not), "")

    def grant(self, wanted: int, context: int) -> tuple[int, Opening | None]:
        """Return the number of tokens to send into the pipeline now, and the first stage's bubble. See `Gate.grant`."""
        if len(self.gates) == 1:
            return self.gates[0].grant(wanted, context)

        def most(tokens: int, now_s: float, closes_s: float) -> int:
            return most_tokens(self._stages(context, now_s, closes_s), tokens, now_s, HOP_S)

        return self.gates[0].grant(wanted, context, most=most, may_try=not self._in_flight)

    def began(self, tokens: int, context: int, closes_s: float) -> None:
        """Count a chunk that was granted as in the pipeline. The first stage's bubble closes at ``closes_s``."""
        if len(self.gates) == 1:
            self._in_flight.append((tokens, context, []))
            return
        now_s = time.monotonic()
        stages = self._stages(context, now_s, closes_s)
        spans = spans_of(stages, tokens, now_s, HOP_S)
        if spans is None:  # a trial
            self.predicted_s = [stage.seconds(tokens, now_s) for stage in stages]
            ends_s = [now_s + end_s for end_s in accumulate(self.predicted_s)]
        else:
            self.predicted_s, ends_s = [end_s - start_s for start_s, end_s in spans], [end_s for _, end_s in spans]
        self._in_flight.append((tokens, context, ends_s))

    def ended(self, spans: Sequence[Span]) -> float:
        """Learn from the oldest chunk, and return the seconds by which it overlapped with training, or 0.0.

        Args:
            spans: for each stage (start, end, processor time or None), in seconds. See `Gate.ended`.
        """
        tokens, context, _ = self._in_flight.popleft()
        return max(
            gate.ended(start_s, end_s, tokens, context, computed_s)
            for gate, (start_s, end_s, computed_s) in zip(self.gates, spans, strict=True)
        )

    def _stages(self, context: int, now_s: float, closes_s: float) -> list[Stage]:
        frees_s = self._in_flight[-1][2] if self._in_flight else [now_s] * len(self.gates)
        first, *later = self.gates
        openings = [[(now_s, closes_s - first.guard_s)], *(_bubbles(gate) for gate in later)]
        return [
            Stage(bubbles, free_s, gate.predicted(context))
            for gate, bubbles, free_s in zip(self.gates, openings, frees_s, strict=True)
        ]


def _bubbles(gate: Gate) -> list[tuple[float, float]]:
    """Return the coming bubbles of a stage's rank, less the guard."""
    (board,) = gate.boards
    closes_s = bubble.closes_s if (bubble := board.state().bubble) is not None else inf
    spans = [(start_s, end_s - gate.guard_s) for start_s, end_s in board.upcoming(HORIZON_S, is_cautious=True)]
    if spans and bubble is not None:  # the end of an open bubble is predicted more cautiously
        spans[0] = spans[0][0], min(spans[0][1], closes_s - gate.guard_s)
    return spans
