"""Log-likelihoods of documents, computed by prefill workers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from itertools import cycle
from math import fsum
from typing import Any, NamedTuple

from weft.engine.data.documents import IGNORED, Document
from weft.inference.worker.scorer import ANSWER_S
from weft.inference.worker.vllm_weights import ROUTE

AT_ONCE = 4
"""Number of documents that one worker has at once, so that a long bubble is filled."""
TRIES = 20
"""Number of requests for a document, of different workers if there are several."""
PAUSE_S = 1.0
"""Pause before a request is sent again, in seconds."""
STATUS_S = 10.0
"""Longest time for a worker to name its weights, in seconds. It does so while it computes."""
LOAD_S = 600.0
"""Longest time for a worker to load weights, in seconds."""


class ScoringError(RuntimeError):
    """Raised if no worker has scored a document."""


class Likelihood(NamedTuple):
    """The likelihood of a token.

    Attributes:
        log: its logarithm.
        is_best: True if no other token is likelier.
    """

    log: float
    is_best: bool


@dataclass(frozen=True)
class Scorer:
    """A prefill worker as an evaluation uses it.

    Attributes:
        key: its API key.
    """

    url: str
    key: str
    model: str

    def weights(self) -> str | None:
        """Return the name of the weights that it has, or None if it does not answer."""
        try:
            return str(self._ask(ROUTE, timeout_s=STATUS_S)["name"])
        except (OSError, HTTPException, ValueError, KeyError):
            return None

    def load(self, weights: str) -> bool:
        """Let it load weights. Return whether it has them."""
        if self.weights() == weights:
            return True
        try:
            return self._ask(ROUTE, {"name": weights}, timeout_s=LOAD_S).get("name") == weights
        except (OSError, HTTPException, ValueError):
            return False

    def likelihoods(self, ids: Sequence[int]) -> list[Likelihood]:
        """Return the likelihood of each token except for the first, given those before it.

        Raises:
            OSError, HTTPException, ValueError: the worker has not answered, or not with likelihoods.
        """
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self._ask("/v1/completions", body, timeout_s=ANSWER_S)
        try:
            given = answer["choices"][0]["prompt_logprobs"]
            found = [each[str(token)] for token, each in list(zip(ids, given, strict=True))[1:]]
            return [Likelihood(float(each["logprob"]), each["rank"] == 1) for each in found]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"an answer without the likelihood of each token ({error!r})") from error

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            value = json.load(response)
        return value if isinstance(value, dict) else {}


def with_weights(scorers: Sequence[Scorer], weights: str) -> list[Scorer]:
    """Let all workers load weights at the same time, and return those that have them."""
    with ThreadPoolExecutor(max(1, len(scorers))) as pool:
        loaded = list(pool.map(lambda scorer: scorer.load(weights), scorers))
    return [scorer for scorer, has in zip(scorers, loaded, strict=True) if has]


def likelihoods_of(scorers: Sequence[Scorer], prompts: Iterable[Sequence[int]]) -> list[list[Likelihood]]:
    """Return `Scorer.likelihoods` of each prompt. A worker that fails is replaced by another, or asked
    again. One that has not answered in time gets no further prompt, if there are others.

    Raises:
        ScoringError: no worker has scored a prompt.
    """

    hanging: set[Scorer] = set()

    def ask(first: int, ids: Sequence[int]) -> list[Likelihood]:
        why = ""
        for number in range(TRIES):
            usable = [scorer for scorer in scorers if scorer not in hanging] or scorers
            scorer = usable[(first + number) % len(usable)]
            try:
                return scorer.likelihoods(ids)
            except TimeoutError:
                hanging.add(scorer)
                why = f"{scorer.url}: no answer in {ANSWER_S:g} s"
            except urllib.error.HTTPError as error:
                why = f"{scorer.url}: {error.code} {error.read(500).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, HTTPException, ValueError) as error:
                why = f"{scorer.url}: {error}"
            time.sleep(PAUSE_S)
        raise ScoringError(why)

    with ThreadPoolExecutor(AT_ONCE * len(scorers)) as pool:
        return list(pool.map(ask, cycle(range(len(scorers))), prompts))


def score_all(scorers: Sequence[Scorer], documents: Sequence[Document]) -> tuple[float, int]:
    """Return the negative log-likelihood of all documents' labels, and their number.

    Raises:
        ScoringError: no worker has scored a document.
    """
    found = likelihoods_of(scorers, [list(map(int, document.ids)) for document in documents])
    terms = [
        each.log
        for document, likelihoods in zip(documents, found, strict=True)
        for label, each in zip(document.labels[1:], likelihoods, strict=True)
        if label != IGNORED
    ]
    return -fsum(terms), len(terms)
