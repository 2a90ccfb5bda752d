"""Scores of token sequences that scorers compute ahead of the steps that need them.

`StepScores` calls `request` with the micro-batches of the next steps, and `take` when it decides about one. Neither
waits. Threads give the rows to scorers meanwhile, each of which is a function of a row's token ids:

    ahead = Ahead([worker.log_probs for worker in workers])

A row's scores are stored under a hash of its token ids, so a step can only take scores of the tokens that it reads.
Scores of another shape, and NaN, infinite, positive or impossibly small ones, are refused: the step computes that
micro-batch in line. A scorer that raises is asked again later, and one that hangs holds up only the rows that it has.
Rows that no coming step needs any more are dropped.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.conf.host.threads import Thread
from weft.engine.models.batch import Batch

log = logging.getLogger(__name__)

Scorer = Callable[[Sequence[int]], "np.ndarray"]
"""Returns the scores of a row's tokens, fp32 [tokens, ...], of which the first does not count. It may raise."""
LEAST = -1e3
"""Smallest plausible log-probability of a token."""
PAUSE_S = 1.0
"""Seconds after which a scorer that has failed is asked again."""


def refuse_implausible(scores: np.ndarray) -> None:
    """Check that scores are log-probabilities.

    Raises:
        ValueError: they are not.
    """
    if not np.isfinite(scores).all() or scores.max(initial=0.0) > 1e-3 or scores.min(initial=0.0) < LEAST:
        raise ValueError(f"log-probabilities from {scores.min():.4g} to {scores.max():.4g}, not from {LEAST:g} to 0")


class _Row(NamedTuple):
    key: bytes
    ids: list[int]


class Ahead:
    """Rows that scorers compute, and their scores until a step takes them."""

    def __init__(
        self,
        scorers: Sequence[Scorer],
        *,
        at_once: int = 4,
        check: Callable[[np.ndarray], None] = refuse_implausible,
    ) -> None:
        """Start threads, which wait for rows.

        Args:
            scorers: each computes ``at_once`` rows at a time.
            check: raises a `ValueError` for scores that are refused.
        """
        self._check = check
        self._change = threading.Condition()
        self._begun: deque[_Row] = deque()
        self._waiting: list[list[_Row]] = []
        self._wanted: set[bytes] = set()
        self._scores: dict[bytes, Tensor] = {}
        self._is_closed = False
        self.num_refused = 0
        """Number of rows whose scores were refused."""
        for number, scorer in enumerate(scorers):
            for _ in range(at_once):
                Thread(self._serve, scorer, name=f"weft-scorer{number}").start()

    def request(self, batches: Sequence[Batch]) -> None:
        """Have the rows of ``batches`` scored, and drop all others.

        A micro-batch that was begun is finished first. Then comes the last one, which has the most time: scorers that
        are slower than the steps would otherwise only finish micro-batches that come too late.
        """
        groups = [_rows(batch) for batch in batches]
        with self._change:
            before, self._wanted = self._wanted, {row.key for group in groups for row in group}
            new = [[row for row in group if row.key not in before] for group in groups]
            kept = ([row for row in group if row.key in self._wanted] for group in (*self._waiting, *new))
            self._waiting = [group for group in kept if group]
            self._begun = deque(row for row in self._begun if row.key in self._wanted)
            self._scores = {key: scores for key, scores in self._scores.items() if key in self._wanted}
            self._change.notify_all()

    def take(self, batch: Batch) -> Tensor | None:
        """Return the scores [B, S, ...] of a micro-batch's tokens, or None if those of a row have not arrived.

        They are 0 for padding.
        """
        rows = _rows(batch)
        with self._change:
            found = [self._scores[row.key] for row in rows if row.key in self._scores]
        if len(found) < len(rows):
            return None
        tokens = torch.zeros((*batch["input_ids"].shape, *found[0].shape[1:]))
        for number, scores in enumerate(found):
            tokens[number, : len(scores)] = scores
        return tokens

    def close(self) -> None:
        """End the threads once their scorers return. Nothing waits for them."""
        with self._change:
            self._is_closed = True
            self._begun.clear()
            self._waiting.clear()
            self._change.notify_all()

    def _serve(self, scorer: Scorer) -> None:
        while (row := self._next()) is not None:
            try:
                scores = np.ascontiguousarray(scorer(row.ids), dtype=np.float32)
                if len(scores) != len(row.ids):
                    raise ValueError(f"scores of {len(scores)} tokens for {len(row.ids)}")
                scores[:1] = 0.0
                self._check(scores)
            except Exception as error:  # any: it is somebody else's code and answer
                self._failed(row, error)
            else:
                with self._change:
                    if row.key in self._wanted:
                        self._scores[row.key] = torch.from_numpy(scores)

    def _failed(self, row: _Row, error: Exception) -> None:
        """Return a row to the queue, or give it up if its scores were refused."""
        refused = isinstance(error, ValueError)
        (log.warning if refused else log.info)("scores of %d tokens: %s", len(row.ids), error)
        with self._change:
            self.num_refused += refused
            if not refused and row.key in self._wanted:
                self._begun.appendleft(row)
        time.sleep(PAUSE_S)

    def _next(self) -> _Row | None:
        with self._change:
            while not self._begun and not self._waiting and not self._is_closed:
                self._change.wait()
            if not self._begun and self._waiting:
                self._begun.extend(self._waiting.pop())
            return None if self._is_closed else self._begun.popleft()


def _rows(batch: Batch) -> list[_Row]:
    """Return the rows of a micro-batch without their padding."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(-1).tolist()
    rows = [row[:length] for row, length in zip(ids.numpy(), lengths, strict=True)]
    return [_Row(hashlib.sha256(row.astype("<i8").tobytes()).digest(), row.tolist()) for row in rows]
