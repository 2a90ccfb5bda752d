"""A prefill worker as training uses it: log-probabilities of tokens, with a proof that the worker has computed them."""

from __future__ import annotations

import hmac
import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.inference.worker.proofs import HEADER, answer_proof, new_nonce, request_proof
from weft.inference.worker.score_arrays import ROUTE, TYPE

ANSWER_S = 600.0
"""Longest time for an answer, in seconds. A worker answers when bubbles have had room for the prompt."""


@dataclass(frozen=True)
class Scorer:
    """A worker that scores text.

    Attributes:
        key: its API key, which is not sent.
    """

    url: str
    key: str
    model: str

    def log_probs(self, ids: Sequence[int]) -> np.ndarray:
        """Return the log-probability of each token given those before it, fp32 [tokens], and 0 for the first.

        Raises:
            ValueError: the answer is not the worker's or has another form, or the worker refuses the request.
            OSError, HTTPException: the worker has not answered.
        """
        found = self._scores(ids, 0, 1)
        if not np.array_equal(found[1:, 0, 0], ids[1:]):
            raise ValueError(f"{self.url}: an answer about other tokens")
        return found[:, 0, 1]

    def top_log_probs(self, ids: Sequence[int], *, top_k: int, words: int) -> np.ndarray:
        """Return the likeliest tokens at each token's position, given those before it, fp32 [tokens, top_k, 2].

        They are ids and log-probabilities, likeliest first, and 0 for the first token. Raises errors as `log_probs`.

        Args:
            words: number of tokens that count.
        """
        return self._scores(ids, top_k, words)

    def _scores(self, ids: Sequence[int], top_k: int, words: int) -> np.ndarray:
        body = json.dumps({"model": self.model, "prompt": ids, "top_k": top_k, "words": words}).encode()
        nonce, key = new_nonce(), self.key.encode()
        headers = {"Authorization": f"Weft {nonce}:{request_proof(key, nonce)}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{ROUTE}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                proof, answer = response.headers.get(HEADER, ""), response.read()
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise ValueError(f"{self.url}: {error.code} {error.read(500).decode(errors='replace')}") from error
            raise
        if not hmac.compare_digest(proof.encode(), answer_proof(key, nonce, body, answer).encode()):
            raise ValueError(f"{self.url}: an answer without a proof that its sender has the key")
        shape = (len(ids), max(1, top_k), 2)
        if len(answer) != np.dtype(TYPE).itemsize * math.prod(shape):
            raise ValueError(f"{self.url}: {len(answer)} bytes instead of the scores {list(shape)}")
        return np.frombuffer(answer, TYPE).reshape(shape)
