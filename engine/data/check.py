"""Check a data source before any rank starts: every line of local files, the columns of tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data.location import locate
from weft.engine.data.messages import FORMS, chat_columns, message_fault, messages_of

_LEAST = {"sequence_length": 2, "shuffle_buffer": 1}


def check_source(data: DataConfig) -> None:
    """Read local files once and report what training could not use; hub names are not checked.

    Raises:
        ValueError: the message has ``data.path``, the file and line if known, and the remedy.
    """
    for name, least in _LEAST.items():
        if getattr(data, name) < least:
            raise ValueError(f"data.{name}={getattr(data, name)}: give at least {least}")
    if not 0 <= data.eval_fraction < 1:
        raise ValueError(f"data.eval_fraction={data.eval_fraction}: give a share from 0 to below 1")
    if data.kind is DataKind.corpus:
        if data.eval_split:
            raise ValueError(
                f"data.eval_split={data.eval_split}: the embedded corpus has no splits; set data.eval_fraction instead"
            )
        return
    location = locate(data)
    if location.path is None or location.saved:
        return
    forms: list[str] = []
    if not sum(_CHECKS[file.suffix](_File(file, location.path, data, forms)) for file in location.files):
        raise ValueError(f"data.path={data.path}: it holds no row; give a file with documents")


@dataclass(frozen=True)
class _File:
    """A data file, and what it must match: the configuration, and the form of the rows so far."""

    path: Path
    root: Path
    data: DataConfig
    forms: list[str]
    """The first column that the row before was read from."""

    @property
    def is_chat(self) -> bool:
        return self.data.kind is DataKind.chat

    @property
    def option(self) -> str:
        """The configuration field that names the field of the rows."""
        return "messages_field" if self.is_chat else "text_field"

    @property
    def field(self) -> str:
        return getattr(self.data, self.option)

    def fault(self, what: str, where: str = "") -> ValueError:
        inside = "" if self.path == self.root else str(self.path.relative_to(self.root))
        place = ", ".join(part for part in (inside, where) if part)
        return ValueError(f"data.path={self.data.path}: {place}{': ' if place else ''}{what}")

    def lines(self) -> Iterator[tuple[int, str]]:
        """Lines with their numbers, from 1."""
        with self.path.open("rb") as opened:
            for number, line in enumerate(opened, start=1):
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise self.fault("not UTF-8; convert the file", f"line {number}") from None

    def check_row(self, row: Any, where: str) -> None:
        """Check a row of parsed JSON."""
        if not isinstance(row, dict):
            example = f"{{{json.dumps(self.field)}: ...}}"
            raise self.fault(f"not an object but a {type(row).__name__}; write rows such as {example}", where)
        fields = self.fields("field", list(row), where)
        if self.is_chat and (what := message_fault(messages_of(row, fields))):
            raise self.fault(what, where)
        if not self.is_chat and not isinstance(row[self.field], str):
            kind = type(row[self.field]).__name__
            raise self.fault(f"field {self.field} is a {kind}, not text; remove the row or set data.text_field", where)

    def fields(self, part: str, found: list[str], where: str = "") -> tuple[str, ...]:
        """The columns to read of those that were found.

        Raises:
            ValueError: there are none, or rows before have their conversation in others.
        """
        fields = chat_columns(found, self.field) if self.is_chat else (self.field,) if self.field in found else ()
        if not fields:
            names, known = ", ".join(found) or "nothing", f" ({FORMS})" if self.is_chat else ""
            what = f"no {part} {self.field}, but {names}"
            raise self.fault(f"{what}; add it, or set data.{self.option} to the one to learn from{known}", where)
        if self.forms and self.forms[0] != fields[0]:
            before = f"that of rows before in {self.forms[0]}"
            raise self.fault(f"its conversation is in {fields[0]}, and {before}; write all alike", where)
        self.forms[:] = fields[:1]
        return fields


def _check_jsonl(file: _File) -> int:
    rows = 0
    for number, line in file.lines():
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            what = f"not JSON ({error.msg} at column {error.colno}); write one object per line"
            raise file.fault(what, f"line {number}") from None
        file.check_row(row, f"line {number}")
        rows += 1
    return rows


def _check_json(file: _File) -> int:
    """Check a .json file: one list of rows, or one row per line."""
    with file.path.open("rb") as opened:
        if opened.read(4096).lstrip()[:1] != b"[":
            return _check_jsonl(file)
    try:
        rows = json.loads("".join(line for _, line in file.lines()))
    except json.JSONDecodeError as error:
        what = f"not JSON ({error.msg} at column {error.colno}); correct the list"
        raise file.fault(what, f"line {error.lineno}") from None
    for number, row in enumerate(rows, start=1):
        file.check_row(row, f"entry {number}")
    return len(rows)


def _check_text(file: _File) -> int:
    if file.is_chat:
        raise file.fault("plain text holds no conversations; give .jsonl, .json or .parquet, or set data.kind=text")
    if file.field != "text":
        raise file.fault(f"the only field of plain text is text; leave out data.text_field={file.field}")
    return 1 if sum(not line.isspace() for _, line in file.lines()) else 0


def _check_parquet(file: _File) -> int:
    try:
        table = pq.ParquetFile(file.path)
    except (pa.ArrowException, OSError) as error:
        raise file.fault(f"not a Parquet file ({str(error).splitlines()[0]}); write it again") from error
    schema = table.schema_arrow
    fields = file.fields("column", schema.names)
    kind = schema.field(fields[0]).type
    if file.is_chat and len(fields) == 1 and not _is_messages(kind):
        raise file.fault(f"column {fields[0]} is {kind}; give a list of structs of role and content")
    if not file.is_chat and not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise file.fault(f"column {file.field} is {kind}, not text; set data.text_field to another")
    return table.metadata.num_rows


def _is_messages(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    item = kind.value_type
    names = {item.field(i).name for i in range(item.num_fields)} if pa.types.is_struct(item) else set()
    return {"role", "content"} <= names or {"from", "value"} <= names


_CHECKS: dict[str, Callable[[_File], int]] = {
    ".jsonl": _check_jsonl,
    ".json": _check_json,
    ".txt": _check_text,
    ".parquet": _check_parquet,
}
"""By suffix, the function that checks a file and returns its number of rows."""
