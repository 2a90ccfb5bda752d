"""Check of a data source before any rank starts: every line of local text and JSON files, the columns of tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from datasets import Features, Json, LargeList, List, Value
from transformers import PreTrainedTokenizerBase

from weft.conf.schema import DataConfig, DataKind
from weft.conf.sources import for_each_source
from weft.engine.data.documents import Part
from weft.engine.data.messages import (
    FORMS,
    TOOLS,
    WEIGHT,
    Conversation,
    chat_columns,
    conversation_fault,
    is_silent,
    kind_of,
)
from weft.engine.data.open import columns_of, encoder_of, locate, open_rows, unread_files
from weft.engine.data.pairs import PAIR_COLUMNS, Pair, pair_columns, pair_fault
from weft.engine.data.rows import RowFault, parquet_features, read_rows
from weft.engine.data.source import no_documents
from weft.engine.data.storage import suffix_of

_LEAST = {"sequence_length": 2, "shuffle_buffer": 1}
SAMPLES = 8
"""Number of conversations to store for each key."""
MOST_RENDERED = 300
"""Number of messages to render before the run."""
MOST_ROWS = 256
"""Number of rows up to which parts for training and evaluation are checked before the run."""
_TEXTS = (Value("string"), Value("large_string"), Value("string_view"))


@dataclass
class Seen:
    """Parts of a source's rows that training may not use, about which `weft launch` warns.

    Attributes:
        unread: columns that training does not read.
        keys: for each key of messages that only a chat template can read, some conversations that have it.
        forms: the first row with each sequence of roles and keys, and where it is.
        files: files of a folder that are in none of the splits to read.
        idle: number of rows that teach nothing, by the reason and where the first one of a source is.
    """

    unread: dict[str, None] = field(default_factory=dict)
    keys: dict[str, list[Conversation]] = field(default_factory=dict)
    forms: dict[object, tuple[str, Conversation | Pair]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    idle: dict[tuple[str, str], int] = field(default_factory=dict)

    def add_idle(self, why: str, where: str) -> None:
        """Count a row that teaches nothing."""
        key = next((each for each in self.idle if each[0] == why), (why, where))
        self.idle[key] = self.idle.get(key, 0) + 1

    def add_form(self, row: Conversation | Pair, where: str) -> None:
        """Store a row if it is the first of its form, among the first `MOST_RENDERED` forms."""
        if len(self.forms) < MOST_RENDERED:
            self.forms.setdefault((bool(row.tools), *map(_form, row)), (where, row))

    def add(self, talk: Conversation) -> None:
        """Store a conversation under each of its keys that have a value, up to `SAMPLES` per key."""
        given = {key for message in talk.messages for key, value in message.items() if value is not None}
        for key in given - {"role", "content", WEIGHT} | ({TOOLS} if talk.tools else set()):
            samples = self.keys.setdefault(key, [])
            if len(samples) < SAMPLES:
                samples.append(talk)


def check_source(data: DataConfig) -> Seen:
    """Read local files once, and require that training can use their rows. Hub names and saved data sets are not read.

    Returns:
        The parts of the rows that training may not use.

    Raises:
        ValueError: training cannot use a row, or a setting is invalid. The message has the setting, the file and line
        if
            known, and the remedy.
    """
    for name, least in _LEAST.items():
        if getattr(data, name) < least:
            raise ValueError(f"data.{name}={getattr(data, name)}: give at least {least}")
    if data.sources:
        return merged(for_each_source(data, check_source))
    if not 0 <= data.eval_fraction < 1:
        raise ValueError(f"data.eval_fraction={data.eval_fraction}: give a share from 0 to below 1")
    if data.kind is DataKind.corpus:
        if data.eval_split:
            raise ValueError(
                f"data.eval_split={data.eval_split}: the embedded corpus has no splits; set data.eval_fraction instead"
            )
        return Seen()
    location = locate(data)
    if location.path is None:
        return Seen()
    check = _Check(location.path, data)
    counts = [check.saved()] if location.saved else [check.rows(Path(file)) for file in location.files]
    if not sum(counts):
        raise ValueError(f"data.path={data.path}: it holds no row; give a file with documents")
    check.seen.files.extend(unread_files(data, location))
    return check.seen


def merged(parts: list[Seen]) -> Seen:
    """Return the parts of all sources' rows."""
    whole = Seen()
    for part in parts:
        whole.unread |= part.unread
        whole.files += part.files
        for key, talks in part.keys.items():
            whole.keys.setdefault(key, []).extend(talks)
        whole.forms |= part.forms
        whole.idle |= part.idle
    return whole


def _form(part: Any) -> object:
    """Return what a chat template may refuse in a list of messages: its roles, and the types of the values of keys."""
    if not isinstance(part, list) or not all(isinstance(each, Mapping) and "role" in each for each in part):
        return type(part)
    keyed = ((each["role"], ((key, _types(value)) for key, value in each.items() if value)) for each in part)
    return tuple((role, *sorted(types)) for role, types in keyed)


def _types(value: Any) -> tuple[str, ...]:
    """Return the types of a value, and of the arguments in a list of calls."""
    calls = [each.get("function", each) for each in value if isinstance(each, Mapping)] if type(value) is list else []
    arguments = [call["arguments"] for call in calls if isinstance(call, Mapping) and "arguments" in call]
    return tuple(sorted({type(each).__name__ for each in (value, *arguments)}))


@dataclass
class _Check:
    """Check of a source's files against the configuration, and against each other."""

    root: Path
    data: DataConfig
    form: str = ""
    """First column that the previous row was read from."""
    seen: Seen = field(default_factory=Seen)
    _file: str = ""
    """The file being checked, in a folder."""

    @property
    def is_chat(self) -> bool:
        return self.data.kind is DataKind.chat

    @property
    def is_pairs(self) -> bool:
        return self.data.kind is DataKind.preference

    @property
    def option(self) -> str:
        """Name of the setting that names the column to read."""
        return "messages_field" if self.is_chat else "text_field"

    @property
    def field(self) -> str:
        return getattr(self.data, self.option)

    def rows(self, file: Path) -> int:
        """Check a file, and return its number of rows. A blank text file has none."""
        self._file = "" if file == self.root else str(file.relative_to(self.root))
        return self._count(self._rows_of(file), is_text=suffix_of(file) == ".txt")

    def saved(self) -> int:
        """Check a data set that `Dataset.save_to_disk` wrote, and return its number of rows."""
        names, _, rows = open_rows(replace(self.data, streaming=True), Path(self.data.cache_dir).expanduser())
        self._fields("column", names)
        return self._count((f"row {number}", row) for number, row in enumerate(rows, start=1))

    def _rows_of(self, file: Path) -> Iterator[tuple[str, Any]]:
        if suffix_of(file) == ".parquet":
            self._check_columns(file)
        yield from read_rows(file, columns_of(self.data))

    def _count(self, rows: Iterable[tuple[str, Any]], *, is_text: bool = False) -> int:
        try:
            return sum([self._checked(row, where, is_text=is_text) for where, row in rows])
        except RowFault as fault:
            raise ValueError(f"{self._place(fault.where)}: {fault.what}") from None

    def _place(self, where: str) -> str:
        inside = ", ".join(part for part in (self._file, where) if part)
        return f"data.path={self.data.path}{': ' if inside else ''}{inside}"

    def _checked(self, row: Any, where: str, *, is_text: bool) -> bool:
        if is_text and (self.is_chat or self.is_pairs):
            held = "pairs" if self.is_pairs else "conversations"
            what = f"plain text holds no {held}; give .jsonl, .json or .parquet, or set data.kind=text"
            raise RowFault(where, what)
        if is_text and self.field != "text":
            raise RowFault(where, f"the only field of plain text is text; leave out data.text_field={self.field}")
        fields = self._fields("field", list(row), where)
        if self.is_pairs:
            if fault := pair_fault(pair := Pair.of(row)):
                raise RowFault(where, fault)
            for talk in pair.talks():
                self.seen.add(talk)
            self.seen.add_form(pair, self._place(where))
            if pair.chosen == pair.rejected:
                self.seen.add_idle("pairs teach nothing, because chosen and rejected are equal", self._place(where))
        elif self.is_chat:
            talk = Conversation.of(row, fields)
            if fault := conversation_fault(talk):
                raise RowFault(where, fault)
            self.seen.add(talk)
            self.seen.add_form(talk, self._place(where))
            if all(is_silent(talk.messages[number]) for number in talk.learnt):
                self.seen.add_idle("conversations teach only to say nothing: all answers are empty", self._place(where))
        elif not isinstance(row[self.field], str):
            kind = kind_of(row[self.field])
            raise RowFault(where, f"field {self.field} is {kind}, not text; remove the row or set data.text_field")
        return not is_text or (not row["text"].isspace() and bool(row["text"]))

    def _fields(self, part: str, found: list[str], where: str = "") -> tuple[str, ...]:
        """Return the columns to read, and record the other ones as unread."""
        if self.is_pairs:
            if not (fields := pair_columns(found)):
                raise RowFault(where, f"no {part}s chosen and rejected, but {', '.join(found) or 'nothing'}; add them")
            self.seen.unread.update(dict.fromkeys(name for name in found if name not in PAIR_COLUMNS))
            return fields
        fields = chat_columns(found, self.field) if self.is_chat else (self.field,) if self.field in found else ()
        if not fields:
            names, known = ", ".join(found) or "nothing", f" ({FORMS})" if self.is_chat else ""
            what = f"no {part} {self.field}, but {names}"
            raise RowFault(where, f"{what}; add it, or set data.{self.option} to the one to learn from{known}")
        if self.form and self.form != fields[0]:
            before = f"that of rows before in {self.form}"
            raise RowFault(where, f"its conversation is in {fields[0]}, and {before}; write all alike")
        self.form = fields[0]
        read = {*fields, TOOLS} if self.is_chat else set(fields)
        self.seen.unread.update(dict.fromkeys(name for name in found if name not in read))
        return fields

    def _check_columns(self, file: Path) -> None:
        """Check the columns of a Parquet file and their types."""
        features = parquet_features(file)
        fields = self._fields("column", list(features))
        if self.is_pairs:
            return
        kind = pq.read_schema(file).field(fields[0]).type
        if self.is_chat and len(fields) == 1 and not _is_messages(features[fields[0]]):
            raise RowFault("", f"column {fields[0]} is {kind}; give a list of structs of role and content")
        if not self.is_chat and features[self.field] not in _TEXTS:
            raise RowFault("", f"column {self.field} is {kind}, not text; set data.text_field to another")


def _is_messages(feature: Any) -> bool:
    if not isinstance(feature, List | LargeList):
        return isinstance(feature, Json)
    item = feature.feature
    names = set(item) if isinstance(item, dict | Features) else set()
    return isinstance(item, Json) or {"role", "content"} <= names or {"from", "value"} <= names


def require_encodable(data: DataConfig, tokenizer: PreTrainedTokenizerBase, seen: Seen) -> None:
    """Encode the first row of each form, because a chat template may refuse later rows than the first.

    Raises:
        ValueError: a row cannot be encoded. The message names the file and line.
    """
    if not seen.forms:
        return
    encoder, rendered = encoder_of(data, tokenizer, ("",)), 0
    for where, row in seen.forms.values():
        rendered += sum(len(part) for part in row if isinstance(part, list))
        if rendered > MOST_RENDERED:
            return
        try:
            encoder([row], [0])
        except ValueError as error:
            raise ValueError(f"{where}: {error.__cause__ or error}") from error


def require_parts(data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, evaluated: bool) -> None:
    """Check that a small source has documents for training, and if ``evaluated`` for evaluation.

    Raises:
        ValueError: all rows have been read, and a part has no document.
    """
    own = bool(data.eval_split)
    if data.kind is DataKind.corpus or not (evaluated if own else data.eval_fraction):
        return
    cache = Path(data.cache_dir).expanduser()
    _, fields, rows = open_rows(replace(data, streaming=True), cache, "eval_split" if own else "split")
    encoder = encoder_of(data, tokenizer, fields)
    fraction, held = (0.0, [False]) if own else (data.eval_fraction, [False, True][: 1 + evaluated])
    missing = [Part(fraction=fraction, evaluation=each) for each in held]
    keys, lengths = list[int](), list[int]()
    for number, row in enumerate(rows):
        if not missing or number == (MOST_ROWS if data.streaming else MOST_ROWS // 8):
            return
        columns = encoder([encoder.value_of(row)], [number])
        keys, lengths = keys + columns["key"], lengths + columns["length"]
        if data.streaming:
            missing = [part for part in missing if not (lengths[-1] and part.of_stream(keys[-1]))]
    if not data.streaming:
        learnt = np.array(lengths) > 0
        missing = [part for part in missing if not (part.of_all(np.array(keys)) & learnt).any()]
    if missing and own:
        what = f"no {encoder.unit} with something to learn among its {len(keys)} rows; give more"
        raise ValueError(f"data.eval_split={data.eval_split}: {what}")
    if missing:
        raise no_documents(data.path, encoder, missing[0], len(keys))
