"""Fingerprints of a Trainer's data and tokenizer, which a resumed run compares with those of its checkpoint."""

from __future__ import annotations

import hashlib
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from weft.engine.data.tokenizer import tokenizer_sha256


def inputs_of(data: Any, tokenizer: Any) -> dict[str, str]:
    """Return the fingerprints by the names of the Trainer's arguments.

    That of a `datasets.Dataset` covers its length and three of its rows. That of other data covers the length only,
    because reading a row may draw random numbers. Data without a length has none.
    """
    found = {}
    if data is not None and has_length(data):
        size, plain = len(data), data.with_format(None) if isinstance(data, Dataset) else None
        rows = [] if plain is None or not size else [plain[number] for number in (0, size // 2, size - 1)]
        found["train_dataset"] = hashlib.sha256(repr((size, rows)).encode()).hexdigest()
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        found["processing_class"] = tokenizer_sha256(tokenizer)
    return found
