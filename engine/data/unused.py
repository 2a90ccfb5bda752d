"""Names the parts of a run's rows that training does not use, or learns otherwise than their author may think."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from weft.conf.host.terminal import printable
from weft.conf.schema import DataConfig, DataKind
from weft.conf.sources import for_each_source, sources_of
from weft.engine.data.chat import ChatEncoder
from weft.engine.data.check import MOST_RENDERED, SAMPLES, Seen, merged
from weft.engine.data.messages import TOOLS, Conversation, conversation_fault
from weft.engine.data.open import open_rows
from weft.engine.data.pairs import Pair, pair_fault


def unused_lines(data: DataConfig, tokenizer: PreTrainedTokenizerBase, seen: Seen) -> list[str]:
    """Return lines of text that name unused columns and keys of a run's rows. Empty if all are used.

    Args:
        seen: results of `check_source` for local files. For other data sets, the columns and first rows are read here.

    Raises:
        ValueError: the data cannot be read.
    """
    if data.kind is DataKind.corpus:
        return []
    if not (seen.unread or seen.keys):
        seen = merged([seen, *for_each_source(data, _seen_in_table)])
    parts = []
    if seen.unread:
        parts.append(f"columns that nothing reads: {', '.join(seen.unread)}")
    if seen.files:
        parts.append(f"files of no split that is read: {', '.join(seen.files)}")
    if data.kind is DataKind.chat or (tokenizer.is_fast and any(_talks(row) for _, row in seen.forms.values())):
        encoder = ChatEncoder(tokenizer, (), template=data.chat_template, limit=data.sequence_length)
        parts += _lost_by_template(encoder, seen, tokenizer.eos_token)
    for (why, where), count in seen.idle.items():
        parts.append(f"{count} {why}, first {where.removeprefix('data.path=')}")
    paths = ", ".join(each.path for each in sources_of(data))
    return [printable(f"{paths}: {'; '.join(parts)}")] if parts else []


def _lost_by_template(encoder: ChatEncoder, seen: Seen, end: str | None) -> Iterator[str]:
    """Yield what the chat template leaves out of rows or does not close. ``end`` is the token that ends a document."""
    if hidden := [key for key, talks in seen.keys.items() if not _is_shown(encoder, key, talks)]:
        yield f"keys of conversations that the chat template does not show: {', '.join(sorted(hidden))}"
    if roles := _hidden_roles(encoder, seen):
        yield f"roles of messages whose content the chat template does not show: {', '.join(roles)}"
    if any(_is_quoted(encoder, talk) for talk in seen.keys.get("tool_calls", ())):
        yield "arguments of tool_calls that are text, which the chat template quotes again: write objects"
    if any(_is_open(encoder, talk, end) for talk in _rendered(seen)):
        yield (
            "answers that the chat template does not close with a token, so that the model does not learn to stop: set "
            "data.chat_template to one that does"
        )


def _seen_in_table(data: DataConfig) -> Seen:
    """Return the unread columns and the first conversations of a hub's or a saved data set."""
    seen = Seen()
    cache = Path(data.cache_dir).expanduser()
    names, fields, rows = open_rows(replace(data, streaming=True), cache)
    text, pairs = data.kind is DataKind.text, data.kind is DataKind.preference
    read = {*fields} if text else {*fields, TOOLS}
    seen.unread.update(dict.fromkeys(name for name in names if name not in read))
    for given in islice(rows, 0 if text else SAMPLES):
        row = Pair.of(given) if pairs else Conversation.of(given, fields)
        if not (pair_fault(row) if isinstance(row, Pair) else conversation_fault(row)):
            for talk in _talks(row):
                seen.add(talk)
            seen.add_form(row, "")
    return seen


def _talks(row: Conversation | Pair) -> list[Conversation]:
    """Return the conversations of a row."""
    return row.talks() if isinstance(row, Pair) else [row]


def _hidden_roles(encoder: ChatEncoder, seen: Seen) -> list[str]:
    """Return the roles of messages, in conversations that the chat template accepts, whose content it leaves out."""
    hidden = set[str]()
    for talk in _rendered(seen):
        with suppress(ValueError):  # a refusal is an error of `require_encodable`
            hidden |= {talk.messages[number]["role"] for number in encoder.hidden(talk)}
    return sorted(hidden)


def _rendered(seen: Seen) -> Iterator[Conversation]:
    """Yield a conversation of each form, as long as they have few messages together."""
    rendered = 0
    for talk in (talk for _, row in seen.forms.values() for talk in _talks(row)):
        if (rendered := rendered + len(talk.messages)) > MOST_RENDERED:
            return
        yield talk


def _is_open(encoder: ChatEncoder, talk: Conversation, end: str | None) -> bool:
    """True if the text of a conversation ends with its last answer, and that not with ``end``."""
    content = talk.messages[-1].get("content")
    answer = content.rstrip() if talk.messages[-1]["role"] == "assistant" and isinstance(content, str) else ""
    if not answer or (end and answer.endswith(end)):
        return False
    with suppress(ValueError):  # a refusal is an error of `require_encodable`
        return encoder.rendered(talk).rstrip().endswith(answer)
    return False


def _is_quoted(encoder: ChatEncoder, talk: Conversation) -> bool:
    """True if the chat template writes arguments of calls, given as JSON text, as a text of JSON."""
    calls = [call for message in talk.messages for call in message.get("tool_calls") or ()]
    inner = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    texts = [each.get("arguments") for each in inner if isinstance(each, Mapping)]
    quoted = [json.dumps(text, ensure_ascii=False) for text in texts if isinstance(text, str) and '"' in text]
    with suppress(ValueError):  # a refusal is an error of the first row
        return any(text in encoder.rendered(talk) for text in quoted)
    return False


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
