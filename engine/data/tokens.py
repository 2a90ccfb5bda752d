"""Token ids of texts of any length, computed with an amount of memory that does not depend on the length of a text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Start and end (exclusive) of a range of characters."""

WINDOW = 1 << 18
"""Number of characters of a long text to tokenise at once. Tokenizers need about 170 bytes for each."""
AT_ONCE = 1 << 22
"""Number of characters of several texts to tokenise at once."""
OVERLAP = 1 << 12
"""Number of characters that two consecutive windows share, in which their tokens must agree."""
AGREEING = 16
"""Number of consecutive tokens that must agree where two windows are joined."""
DIFFERENT = 4
"""Least number of different ones among these tokens, because repetitions of one character agree by accident."""


class Tokens(NamedTuple):
    """Token ids of a text.

    Attributes:
        ids: token ids. If they are incomplete, there are more than the limit.
        spans: character range of each token, or empty if they were not requested.
        complete: True if the text was read to its end.
    """

    ids: list[int]
    spans: list[Span]
    complete: bool


@contextmanager
def panics_named() -> Iterator[None]:
    """Context that raises ValueError where tokenizers panics: a pattern of a tokenizer may take endless trials."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"the tokenizer cannot encode a text ({error}); correct the patterns in its tokenizer.json"
        ) from None


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, limit: int | None = None, spans: bool = False
) -> list[Tokens]:
    """Tokenise texts, without special tokens around them.

    Args:
        limit: read a long text only until it has more tokens than this. None reads all of it.
        spans: also return the character range of each token.
    """
    found: list[Tokens] = []
    batch: list[str] = []
    characters = 0

    def finish() -> None:
        with panics_named():
            encoded = tokenizer(batch, add_special_tokens=False, return_offsets_mapping=spans, verbose=False)
        places = encoded["offset_mapping"] if spans else [[]] * len(batch)
        for ids, where in zip(encoded["input_ids"], places, strict=True):
            found.append(Tokens(ids, where, True))
        batch.clear()

    for text in texts:
        is_long = len(text) > WINDOW and tokenizer.is_fast
        if batch and (is_long or characters + len(text) > AT_ONCE):
            finish()
            characters = 0
        if is_long:
            found.append(_of_long(tokenizer, text, limit, spans))
        else:
            batch.append(text)
            characters += len(text)
    if batch:
        finish()
    return found


def _of_long(tokenizer: PreTrainedTokenizerBase, text: str, limit: int | None, spans: bool) -> Tokens:
    if limit is not None:  # the first half of a window does not depend on what follows the window
        ids, where = _encode(tokenizer, text, 0, WINDOW)
        count = bisect_right(where, WINDOW // 2, key=lambda span: span[1])
        if count > limit:
            return Tokens(ids[:count], where[:count] if spans else [], False)
    ids, where = [], []
    for some, places in windows(tokenizer, text):
        ids += some
        where += places if spans else []
        if limit is not None and len(ids) > limit:
            return Tokens(ids, where, False)
    return Tokens(ids, where, True)


def windows(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[tuple[list[int], list[Span]]]:
    """Yield the tokens of a long text, one window of it at a time.

    A window is joined to the previous one at tokens that both have, so that words are not cut at the start of a window.
    If they do not agree anywhere, the window begins earlier, if necessary at the beginning of the previous one.
    """
    ids, spans = _encode(tokenizer, text, 0, WINDOW)
    begin, end, size, overlap = 0, WINDOW, WINDOW, OVERLAP
    while end < len(text):
        start, stop = max(begin, end - overlap), end + size
        more, places = _encode(tokenizer, text, start, stop)
        if start == begin:
            behind = bisect_left(places, spans[0][0], key=lambda place: place[0]) if spans else 0
            size *= 2
        elif joint := _joint(ids, spans, more, places, start + overlap // 2):
            at, behind = joint
            yield ids[:at], spans[:at]
        else:
            overlap *= AGREEING
            continue
        ids, spans = more[behind:], places[behind:]
        begin, end, overlap = start, stop, OVERLAP
    yield ids, spans


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, start: int, end: int) -> tuple[list[int], list[Span]]:
    with panics_named():
        encoded = tokenizer(text[start:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], [(start + first, start + last) for first, last in encoded["offset_mapping"]]


def _joint(
    ids: Sequence[int], spans: Sequence[Span], more: Sequence[int], places: Sequence[Span], least: int
) -> tuple[int, int] | None:
    """Return the indices in two windows from which their tokens agree, after character ``least``, or None."""
    starts = {place[0]: number for number, place in reversed(list(enumerate(places)))}
    for at in range(bisect_left(spans, least, key=lambda span: span[0]), len(spans) - AGREEING):
        behind = starts.get(spans[at][0])
        if behind is None or behind + AGREEING > len(more):
            continue
        ours, theirs = slice(at, at + AGREEING), slice(behind, behind + AGREEING)
        same = (ids[ours], spans[ours]) == (more[theirs], places[theirs])
        if same and len(set(ids[ours])) >= DIFFERENT:
            return at, behind
    return None
