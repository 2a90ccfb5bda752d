"""The first row of a run's data as the model receives it: its text, and the tokens that count in the loss."""

from __future__ import annotations

from itertools import groupby

from transformers import PreTrainedTokenizerBase

from weft.conf.schema import DataKind, WeftConfig
from weft.engine.data import check_source, encode_first, load_tokenizer, unused_lines
from weft.engine.data.documents import IGNORED, Document
from weft.tools.preflight import is_here

MOST_CHARACTERS = 800
"""Maximum number of characters of a row that are shown."""


def first_row_lines(config: WeftConfig) -> list[str]:
    """Return lines that show the first row of local data; empty for the embedded corpus and for data of a hub.

    If only some tokens count in the loss, they stand in «these».
    """
    if config.data.kind is DataKind.corpus or not is_here(config.data.path):
        return []
    try:
        tokenizer = load_tokenizer(config.model, config.data)
        row = encode_first(config.data, tokenizer)
        unused = unused_lines(config.data, tokenizer, check_source(config.data))
    except ValueError as error:
        return [f"first row: not shown ({error})"]
    counted = sum(label != IGNORED for label in row.labels)
    which = "all of which count" if counted == len(row.ids) else f"of which {counted:,} count in the loss, «these»"
    text = _marked(row, tokenizer) if counted < len(row.ids) else _printable(tokenizer.decode(row.ids))
    head = f"first row of {config.data.path}: {len(row.ids):,} tokens, {which}"
    return [head, *_shortened(text).splitlines(), *unused]


def _marked(row: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    parts = []
    at = 0
    for counts, labels in groupby(row.labels, lambda label: label != IGNORED):
        here = len(list(labels))
        text = _printable(tokenizer.decode(row.ids[at : at + here]))
        parts.append(f"«{text}»" if counts else text)
        at += here
    return "".join(parts)


def _printable(text: str) -> str:
    """Escape control characters."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def _shortened(text: str) -> str:
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
