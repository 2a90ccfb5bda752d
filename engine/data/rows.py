"""Rows of local files or files on the hub, as they are written: types are not guessed, so text stays text."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from gzip import BadGzipFile
from io import BufferedReader, RawIOBase
from lzma import LZMAError
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, IterableDataset, Value

from weft.conf.host.private import without_credentials
from weft.engine.data.messages import kind_of, without_nulls
from weft.engine.data.shards import SampleFault, read_samples
from weft.engine.data.storage import MOST_ROW_BYTES, SEPARATORS, is_url, open_file, suffix_of, version_of

MOST_LIST_CHARACTERS = 1 << 30
_LINES = "write one object per line"
READ_BYTES = 1 << 20
PARQUET_ROWS = 32
"""Number of rows of a Parquet file to read at once."""
_DAMAGE = (EOFError, BadGzipFile, LZMAError, zlib.error)
_BAD_BZ2 = "Invalid data stream"
"""Message of the OSError of bz2 for data that is not of this form. Other OSErrors are the storage's."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of half a surrogate pair. JSON writes characters beyond the first 65,536 as two of these escapes."""


class RowFault(ValueError):
    """Error of a file that cannot be read.

    Attributes:
        where: the line or the entry, or an empty string.
        what: the problem and the remedy.
    """

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}" if where else what)
        self.where, self.what = where, what


@dataclass(frozen=True)
class FileRows:
    """The rows of files, one file after the other.

    Attributes:
        files: paths, or URLs of files that never change.
        columns: the columns to read of tables.
    """

    files: tuple[Path | str, ...]
    columns: tuple[str, ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return _rows_of(list(map(str, self.files)), self.columns)

    @property
    def column_names(self) -> list[str]:
        """Columns of the first file if it is a table, otherwise the keys of the first row."""
        if suffix_of(self.files[0]) == ".parquet":
            return list(parquet_features(self.files[0]))
        return list(next(iter(self), {}))

    @property
    def fingerprint(self) -> str:
        """Hash that changes when a file's path, size or time of modification changes."""
        return hashlib.sha256(repr([version_of(file) for file in self.files]).encode()).hexdigest()

    def streamed(self) -> IterableDataset:
        """Return the rows as a stream, whose position can be saved."""
        given = {"files": list(map(str, self.files)), "columns": self.columns}
        return IterableDataset.from_generator(_rows_of, gen_kwargs=given)


def _rows_of(files: list[str], columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for file in files:
        try:
            yield from (row for _, row in read_rows(file if is_url(file) else Path(file), columns))
        except RowFault as error:
            raise ValueError(f"{without_credentials(file)}: {error}") from error
        except Exception as error:  # any: each storage has errors of its own, which name the URL
            if not is_url(file):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            what = f"{file}: reading has failed ({type(error).__name__}: {reason})"
            raise OSError(without_credentials(what)) from None


def read_rows(file: Path | str, columns: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each with its line or entry.

    Args:
        file: a path or a URL. The file may be compressed.
        columns: the columns to read of a table.

    Raises:
        RowFault: a row cannot be read.
    """
    suffix = suffix_of(file)
    if suffix == ".parquet":
        yield from _parquet(file, columns)
    elif suffix in SEPARATORS:
        yield from _separated(file, SEPARATORS[suffix])
    elif suffix == ".tar":
        try:
            yield from read_samples(file)
        except SampleFault as error:
            raise RowFault(error.where, error.what) from error
    elif suffix == ".txt":  # one document, because single lines lose their context
        yield "", {"text": "".join(line for _, line in _lines(file)).replace("\r\n", "\n").replace("\r", "\n")}
    else:
        for where, row in _json_list(file) if suffix == ".json" and _is_list(file) else _json_lines(file):
            if not isinstance(row, dict):
                raise RowFault(where, f'not an object but {kind_of(row)}; write rows such as {{"text": ...}}')
            yield where, row


def parquet_features(file: Path | str) -> Features:
    """Return the columns of a Parquet file and their types. A type that `datasets` does not have is that of nulls.

    Raises:
        RowFault: the file is not a Parquet file.
    """
    try:
        with open_file(file) as opened:
            schema = pq.read_schema(opened)
    except (pa.ArrowException, OSError) as error:
        raise RowFault("", f"not a Parquet file ({str(error).splitlines()[0]}); write it again") from error
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise RowFault("", f"column {twice[0]} is there twice; rename one")
    try:
        return Features.from_arrow_schema(schema)
    except (ValueError, TypeError):
        return Features({column.name: _feature(column) for column in schema})


def _feature(column: pa.Field) -> Any:
    try:
        return Features.from_arrow_schema(pa.schema([column]))[column.name]
    except (ValueError, TypeError):
        return Value("null")


def broken_text(value: Any, path: str = "") -> str | None:
    """Return the path to a text inside ``value`` that has half of a surrogate pair, which no file can store, or
    None.
    """
    if isinstance(value, str):
        return path if any("\ud800" <= character <= "\udfff" for character in value) else None
    if isinstance(value, Mapping):
        keyed = ((name, each, f"{path}.{name}" if path else str(name)) for name, each in value.items())
        inside = (pair for name, each, where in keyed for pair in ((name, where), (each, where)))
    else:
        inside = ((each, f"{path}[{n}]") for n, each in enumerate(value if isinstance(value, list) else ()))
    return next((found for each, where in inside if (found := broken_text(each, where))), None)


def _lines(file: Path | str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, from 1. Only line feeds separate lines.

    A line has a largest size, because a small compressed file, or one with holes, may have a line of any size.
    """
    # File objects of fsspec read whole lines only.
    with open_file(file) as opened, BufferedReader(cast(RawIOBase, opened), READ_BYTES) as lines:
        for number, line in enumerate(_whole_lines(cast(BinaryIO, lines)), start=1):
            if len(line) > MOST_ROW_BYTES:
                raise RowFault(f"line {number}", f"more than {MOST_ROW_BYTES >> 20} MiB; write shorter lines")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise RowFault(f"line {number}", "not UTF-8; convert the file") from None


def _whole_lines(lines: BinaryIO) -> Iterator[bytes]:
    try:
        yield from iter(partial(lines.readline, MOST_ROW_BYTES + 1), b"")
    except Exception as error:
        if not isinstance(error, _DAMAGE) and error.args != (_BAD_BZ2,):
            raise
        raise RowFault("", f"not decompressed ({error}); write the file again") from error


def _separated(file: Path | str, separator: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table in text, whose first line has the columns' names. All values are texts."""
    csv.field_size_limit(MOST_ROW_BYTES // 4)  # a character takes 4 bytes
    reader = csv.reader((line for _, line in _lines(file)), delimiter=separator, strict=True)
    try:
        names = next(reader, [])
        if twice := [name for name in names if names.count(name) > 1]:
            raise RowFault("", f"column {twice[0]} is there twice; rename one")
        for cells in filter(None, reader):
            if len(cells) != len(names):
                what = f"{len(cells)} values for {len(names)} columns; quote values that contain {separator!r}"
                raise RowFault(f"line {reader.line_num}", what)
            yield f"line {reader.line_num}", dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise RowFault(f"line {reader.line_num}", f"not a row ({error}); write the file again") from error


def _is_list(file: Path | str) -> bool:
    with open_file(file) as opened:
        return opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _json_lines(file: Path | str) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(file):
        if line.strip():
            yield f"line {number}", _parsed(line.rstrip(), number, _LINES)


def _json_list(file: Path | str) -> Iterator[tuple[str, Any]]:
    lines = list[str]()
    left = MOST_LIST_CHARACTERS
    for number, line in _lines(file):
        if (left := left - len(line)) < 0:
            raise RowFault(f"line {number}", f"a list of more than {MOST_LIST_CHARACTERS:,} characters; {_LINES}")
        lines.append(line)
    text = "".join(lines)
    rows = _parsed(text, 1, "correct the list")
    yield from ((f"entry {number}", row) for number, row in enumerate(rows, start=1))


def _parsed(text: str, line: int, remedy: str) -> Any:
    """Parse JSON text that begins in line ``line`` of a file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            names = [name for name, _ in pairs]
            raise _Repeated(next(name for name in names if names.count(name) > 1))
        return mapping

    where = f"line {line}"
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except _Repeated as error:
        raise RowFault(where, f"an object has the key {json.dumps(str(error))} twice; leave one of them") from None
    except json.JSONDecodeError as error:
        raise RowFault(
            f"line {line + error.lineno - 1}", f"not JSON ({error.msg} at column {error.colno}); {remedy}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise RowFault(where, f"not read ({str(error).splitlines()[0]}); {remedy}") from None
    if _HALF.search(text) and (path := broken_text(value)):
        what = (
            f"field {path!a} has half of a surrogate pair (\\ud800 to \\udfff), which is no character; write it whole"
        )
        raise RowFault(where, what)
    return value


class _Repeated(Exception):
    """Raised for an object that has a key twice."""


def _parquet(file: Path | str, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
    features = parquet_features(file)
    names = [name for name in features if name in columns]
    read = Features({name: features[name] for name in names})
    number = 0
    try:
        with open_file(file) as opened, pq.ParquetFile(opened) as table:
            for batch in table.iter_batches(PARQUET_ROWS, columns=names):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", without_nulls(read.decode_example(row))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RowFault(
            f"after row {number}", f"not read ({str(error).splitlines()[0]}); write the file again"
        ) from error
