"""Scores of token sequences that scorers compute ahead of the steps that need them.

`StepScores` calls `request` with the micro-batches of the next steps, and `take` when it decides about one. Neither
waits. Threads give the documents to scorers meanwhile, each of which is a function of a document's token ids:

    ahead = Ahead([worker.log_probs for worker in workers])

A document is a row without padding, or one of those that are packed into a row, and has labels. Its scores are stored
under a hash of its token ids, so a step can only take scores of the tokens that it reads. Scores of another shape, and
NaN, infinite, positive or impossibly small ones, are refused: the step computes that micro-batch in line. If a scorer
raises, its document is requested again later. A hanging scorer delays only its own documents. Documents that no coming
step needs any more are dropped.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.conf.host.threads import Thread
from weft.engine.models.batch import Batch, sequence_indices

log = logging.getLogger(__name__)

Scorer = Callable[[Sequence[int]], "np.ndarray"]
"""Returns the scores of a document's tokens, fp32 [tokens, ...], of which the first does not count. It may raise."""
LEAST = -1e3
"""Smallest plausible log-probability of a token."""
PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
"""Seconds before the next request to a scorer that has failed. They double with each failure in a row."""


def refuse_implausible(scores: np.ndarray) -> None:
    """Check that scores are log-probabilities. Raise ValueError if they are not."""
    if not np.isfinite(scores).all() or scores.max(initial=0.0) > 1e-3 or scores.min(initial=0.0) < LEAST:
        raise ValueError(f"log-probabilities from {scores.min():.4g} to {scores.max():.4g}, not from {LEAST:g} to 0")


def refuse_other_tokens(scores: np.ndarray, words: int) -> None:
    """Check that scores [tokens, k, 2] are distinct ids below ``words``, and their log-probabilities, likeliest first.

    Raises:
        ValueError: they are not, or the sum of their probabilities is above 1.
    """
    logs = scores[1:, :, 1]
    refuse_implausible(logs)
    ids = np.sort(scores[1:, :, 0], -1)
    if not np.array_equal(ids, np.rint(ids)) or ids.min(initial=0.0) < 0 or ids.max(initial=0.0) >= words:
        raise ValueError(f"likely tokens from {ids.min():.8g} to {ids.max():.8g}, not ids below {words}")
    if (np.diff(ids) == 0).any() or (np.diff(logs) > 0).any() or np.exp(logs).sum(-1).max(initial=0.0) > 1 + 1e-3:
        raise ValueError("likely tokens that repeat, are not in order, or have a sum of probabilities above 1")


class _Document(NamedTuple):
    """Token ids ``start`` to ``stop`` of a row of a micro-batch, and their hash."""

    key: bytes
    ids: list[int]
    row: int
    start: int


class Ahead:
    """Documents that scorers compute, and their scores until a step takes them."""

    def __init__(
        self,
        scorers: Sequence[Scorer],
        *,
        at_once: int = 4,
        check: Callable[[np.ndarray], None] = refuse_implausible,
    ) -> None:
        """Start threads, which wait for documents.

        Args:
            scorers: each computes ``at_once`` documents at a time.
            check: raises a `ValueError` for scores that are refused.
        """
        self._check = check
        self._change = threading.Condition()
        self._begun: deque[_Document] = deque()
        self._waiting: list[list[_Document]] = []
        self._wanted: set[bytes] = set()
        self._known: dict[int, tuple[Batch, list[_Document]]] = {}
        self._scores: dict[bytes, Tensor] = {}
        self._is_closed = False
        self.num_refused = 0
        """Number of documents whose scores were refused."""
        for number, scorer in enumerate(scorers):
            for _ in range(at_once):
                Thread(self._serve, scorer, name=f"weft-scorer{number}").start()

    def request(self, batches: Sequence[Batch]) -> None:
        """Have the documents of ``batches`` scored, and drop all others.

        A micro-batch that was begun is finished first. Then comes the last one, which has the most time: scorers that
        are slower than the steps would otherwise only finish micro-batches that come too late.
        """
        self._known = {id(batch): (batch, self._documents(batch)) for batch in batches}
        groups = [{each.key: each for each in documents} for _, documents in self._known.values()]
        with self._change:
            before, self._wanted = self._wanted, {key for group in groups for key in group}
            new = [[each for key, each in group.items() if key not in before] for group in groups]
            kept = ([each for each in group if each.key in self._wanted] for group in (*self._waiting, *new))
            self._waiting = [group for group in kept if group]
            self._begun = deque(each for each in self._begun if each.key in self._wanted)
            self._scores = {key: scores for key, scores in self._scores.items() if key in self._wanted}
            self._change.notify_all()

    def take(self, batch: Batch) -> Tensor | None:
        """Return the scores [B, S, ...] of a micro-batch's tokens, or None if those of a document have not arrived.

        They are 0 for padding, and for documents without labels.
        """
        documents = self._documents(batch)
        with self._change:
            found = [self._scores[each.key] for each in documents if each.key in self._scores]
        if len(found) < len(documents) or not found:
            return None
        tokens = torch.zeros((*batch["input_ids"].shape, *found[0].shape[1:]))
        for each, scores in zip(documents, found, strict=True):
            tokens[each.row, each.start : each.start + len(scores)] = scores
        return tokens

    def _documents(self, batch: Batch) -> list[_Document]:
        """Return the documents of a micro-batch, which are found once while it is wanted."""
        known = self._known.get(id(batch))
        return _documents(batch) if known is None else known[1]

    def close(self) -> None:
        """End the threads once their scorers return. Nothing waits for them."""
        with self._change:
            self._is_closed = True
            self._begun.clear()
            self._waiting.clear()
            self._change.notify_all()

    def _serve(self, scorer: Scorer) -> None:
        pause_s = PAUSE_S
        while (document := self._next()) is not None:
            try:
                scores = np.array(scorer(document.ids), dtype=np.float32)
                if len(scores) != len(document.ids):
                    raise ValueError(f"scores of {len(scores)} tokens for {len(document.ids)}")
                scores[:1] = 0.0
                self._check(scores)
            except Exception as error:  # any: it is somebody else's code and answer
                self._failed(document, error)
                with self._change:
                    self._change.wait_for(lambda: self._is_closed, pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
                continue
            pause_s = PAUSE_S
            with self._change:
                if document.key in self._wanted:
                    self._scores[document.key] = torch.from_numpy(scores)

    def _failed(self, document: _Document, error: Exception) -> None:
        """Return a document to the queue, or give it up if its scores were refused."""
        refused = isinstance(error, ValueError)
        (log.warning if refused else log.info)("scores of %d tokens: %s", len(document.ids), error)
        with self._change:
            self.num_refused += refused
            if not refused and document.key in self._wanted:
                self._begun.appendleft(document)

    def _next(self) -> _Document | None:
        with self._change:
            while not self._begun and not self._waiting and not self._is_closed:
                self._change.wait()
            if not self._begun and self._waiting:
                self._begun.extend(self._waiting.pop())
            return None if self._is_closed else self._begun.popleft()


def _documents(batch: Batch) -> list[_Document]:
    """Return the documents with labels in the rows of a micro-batch, without padding."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(-1).tolist()
    indices = sequence_indices(batch["position_ids"]) if "position_ids" in batch else torch.zeros_like(ids)
    documents = []
    for row, (words, labels, length) in enumerate(zip(ids.numpy(), batch["labels"].numpy(), lengths, strict=True)):
        starts = [0, *(np.diff(indices[row, :length].numpy()).nonzero()[0] + 1).tolist()]
        for start, stop in pairwise([*starts, length]):
            if (labels[start + 1 : stop] != -100).any():
                own = words[start:stop]
                key = hashlib.sha256(own.astype("<i8").tobytes()).digest()
                documents.append(_Document(key, own.tolist(), row, start))
    return documents
