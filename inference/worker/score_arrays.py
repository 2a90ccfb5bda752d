"""Log-probabilities of a prompt's tokens, as the array in which a worker sends them.

vLLM's own route returns a JSON object for each likely token, which takes seconds to make and to read: 64 likely tokens
of 1024 are 5 MB. The array is fp32 [tokens, k, 2], little-endian: of each token's k likeliest candidates the id and the
log-probability. With k = 0 it has the prompt's own tokens, [tokens, 1, 2]. The first token has zeros.
"""

from __future__ import annotations

import numpy as np

from weft.inference.requests import Refusal

ROUTE = "/weft/scores"
TYPE = "<f4"
SPARE = 8
"""Number of further candidates to compute if some tokens of the model do not count."""


def as_array(candidates: np.ndarray, top_k: int, words: int) -> np.ndarray:
    """Return the array of an answer.

    Args:
        candidates: the ids and log-probabilities [tokens - 1, n, 2] of the tokens after the first, likeliest first.

    Raises:
        Refusal: fewer than ``top_k`` of a token's candidates count.
    """
    if top_k:
        counts = candidates[..., 0] < words
        if counts.sum(-1).min(initial=top_k) < top_k:
            raise Refusal(422, f"fewer than {top_k} of the likeliest tokens are below {words}")
        first = np.argsort(~counts, -1, kind="stable")[:, :top_k]
        candidates = np.take_along_axis(candidates, first[..., None], 1)
    return np.pad(candidates.astype(TYPE), ((1, 0), (0, 0), (0, 0)))
