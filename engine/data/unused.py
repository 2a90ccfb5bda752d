"""Columns and keys of a data set that are not used, so that misspelt or unsupported ones are noticed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data.chat import ChatEncoder
from weft.engine.data.check import SAMPLES, Seen
from weft.engine.data.messages import TOOLS, Conversation, conversation_fault
from weft.engine.data.open import open_rows


def unused_lines(data: DataConfig, tokenizer: PreTrainedTokenizerBase, seen: Seen) -> list[str]:
    """Return lines of text that name unused columns and keys of a run's rows. Empty if all are used.

    Args:
        seen: results of `check_source` for local files. For other data sets, the columns and first rows are read here.

    Raises:
        ValueError: the data cannot be read.
    """
    if data.kind is DataKind.corpus:
        return []
    chat = data.kind is DataKind.chat
    encoder = ChatEncoder(tokenizer, (), template=data.chat_template, limit=data.sequence_length) if chat else None
    if not (seen.unread or seen.keys):
        seen = _seen_in_table(data)
    hidden = [] if encoder is None else [key for key, talks in seen.keys.items() if not _is_shown(encoder, key, talks)]
    parts = []
    if seen.unread:
        parts.append(f"columns that nothing reads: {', '.join(seen.unread)}")
    if hidden:
        parts.append(f"keys of conversations that the chat template does not show: {', '.join(sorted(hidden))}")
    return [f"{data.path}: {'; '.join(parts)}"] if parts else []


def _seen_in_table(data: DataConfig) -> Seen:
    """Return the unread columns and the first conversations of a hub's or a saved data set."""
    seen = Seen()
    cache = Path(data.cache_dir).expanduser()
    names, fields, rows = open_rows(replace(data, streaming=True), cache)
    read = {*fields, TOOLS} if data.kind is DataKind.chat else {*fields}
    seen.unread.update(dict.fromkeys(name for name in names if name not in read))
    for row in islice(rows, SAMPLES if data.kind is DataKind.chat else 0):
        talk = Conversation.of(row, fields)
        if not conversation_fault(talk):
            seen.add(talk)
    return seen


def _is_shown(encoder: ChatEncoder, key: str, talks: Collection[Conversation]) -> bool:
    """True if the text of one of the conversations changes when the key is removed."""
    for talk in talks:
        bare = [{name: value for name, value in message.items() if name != key} for message in talk.messages]
        try:
            if encoder.rendered(talk) != encoder.rendered(Conversation(bare, None if key == TOOLS else talk.tools)):
                return True
        except ValueError:  # it is refused without the key
            return True
    return False
