"""A prefill worker as training uses it: log-probabilities of tokens, with a proof that the worker has computed them."""

from __future__ import annotations

import hmac
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.inference.worker.proofs import HEADER, answer_proof, new_nonce, request_proof

ANSWER_S = 600.0
"""Longest time for an answer, in seconds. A worker answers when bubbles have had room for the prompt."""


class Likelihood(NamedTuple):
    """The likelihood of a token.

    Attributes:
        log: its logarithm.
        is_best: True if no other token is likelier.
    """

    log: float
    is_best: bool


def scoring_request(model: str, ids: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request for the likelihood of each token."""
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


def likelihoods_in(answer: Any, ids: Sequence[int]) -> list[Likelihood]:
    """Return from an answer the likelihood of each token except for the first, given those before it.

    Raises:
        ValueError: the answer has no such likelihoods.
    """
    try:
        given = answer["choices"][0]["prompt_logprobs"]
        found = [each[str(token)] for token, each in list(zip(ids, given, strict=True))[1:]]
        return [Likelihood(float(each["logprob"]), each["rank"] == 1) for each in found]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"an answer without the likelihood of each token ({error!r})") from error


@dataclass(frozen=True)
class Scorer:
    """A worker that scores text.

    Attributes:
        url: URL of its server.
        key: its API key, which is not sent.
        model: name of its model.
    """

    url: str
    key: str
    model: str

    def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token given those before it, and 0 for the first.

        Raises:
            ValueError: the answer is not the worker's or has no log-probabilities, or the worker refuses the request.
            OSError, HTTPException: the worker has not answered.
        """
        body = json.dumps(scoring_request(self.model, ids))
        request, nonce, key = body.encode(), new_nonce(), self.key.encode()
        headers = {"Authorization": f"Weft {nonce}:{request_proof(key, nonce)}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/completions", request, headers)
        try:
            with urllib.request.urlopen(asked, timeout=ANSWER_S) as response:
                proof, answer = response.headers.get(HEADER, ""), response.read()
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise ValueError(f"{self.url}: {error.code} {error.read(500).decode(errors='replace')}") from error
            raise
        if not hmac.compare_digest(proof.encode(), answer_proof(key, nonce, request, answer).encode()):
            raise ValueError(f"{self.url}: an answer without a proof that its sender has the key")
        try:
            return [0.0, *(each.log for each in likelihoods_in(json.loads(answer), ids))]
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}") from error
