"""Opening of the source that a data configuration describes, with Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from datasets import (
    BuilderConfig,
    Dataset,
    DatasetDict,
    IterableDataset,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.data_files import FILES_TO_IGNORE
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.csv.csv import CsvConfig
from datasets.packaged_modules.json.json import JsonConfig
from huggingface_hub import hf_hub_download
from transformers import PreTrainedTokenizerBase

from weft.conf.host.files import JsonCache
from weft.conf.host.private import without_credentials
from weft.conf.schema import DataConfig, DataKind
from weft.conf.sources import for_each_source
from weft.engine.data.chat import ChatEncoder
from weft.engine.data.corpus import load_corpus
from weft.engine.data.documents import IGNORED, Document, Part
from weft.engine.data.encode import Encoder, TextEncoder
from weft.engine.data.messages import TOOLS, chat_columns, read_columns, without_nulls
from weft.engine.data.mixture import MixedSource, Weighted
from weft.engine.data.pairs import COLUMNS, PAIR_COLUMNS, PairEncoder, pair_columns
from weft.engine.data.rows import FileRows
from weft.engine.data.source import LoadedSource, Source, StreamedSource, tokenised
from weft.engine.data.splits import splits_of
from weft.engine.data.storage import BUILDERS, SEPARATORS, UNREAD, is_url, remote_files, suffix_of


@dataclass(frozen=True, kw_only=True)
class Location:
    """Location of a data set's rows.

    Attributes:
        name: ``data.path`` as configured.
        path: the file or folder, or None for a hub name and a URL.
        files: sorted data files, which may be URLs. Empty for a hub name, and for a folder that
            `Dataset.save_to_disk` wrote.
        saved: whether `Dataset.save_to_disk` wrote the folder.
    """

    name: str
    path: Path | None
    files: tuple[Path | str, ...] = ()
    saved: bool = False


def locate(data: DataConfig) -> Location:
    """Find out what ``data.path`` is.

    Raises:
        ValueError: the path does not exist, has an unsupported suffix, or is a folder without data files or with
            several kinds of them.
    """
    if is_url(data.path):
        return Location(name=data.path, path=None, files=_alike(data, remote_files(data.path)))
    path = Path(data.path).expanduser()
    if path.is_dir():
        return _folder(data, path)
    if path.is_file():
        if suffix_of(path) not in BUILDERS:
            raise ValueError(
                f"data.path={data.path}: files of kind {path.suffix or '(no suffix)'} are not read; "
                f"convert it to one of {', '.join(BUILDERS)}"
            )
        return Location(name=data.path, path=path, files=(path,))
    if not data.path or data.path[0] in "./~" or suffix_of(path) in BUILDERS or data.path.count("/") > 1:
        raise ValueError(f"data.path={data.path}: does not exist; give a file, a folder, or a hub name as owner/name")
    return Location(name=data.path, path=None)


def _folder(data: DataConfig, path: Path) -> Location:
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return Location(name=data.path, path=path, saved=True)
    present = (file for file in path.rglob("*") if suffix_of(file) in (*BUILDERS, *UNREAD) and _is_data(file, path))
    return Location(name=data.path, path=path, files=_alike(data, tuple(sorted(present))))


def _alike(data: DataConfig, present: tuple[Path | str, ...]) -> tuple[Path | str, ...]:
    """Return the files of a folder or pattern, which must be of one kind that is read."""
    files = tuple(file for file in present if suffix_of(file) in BUILDERS)
    kinds = sorted({suffix_of(file) for file in files})
    if unread := [file for file in present if file not in files]:
        raise ValueError(
            f"data.path={data.path}: {unread[0]} ({len(unread)} such) would not be read, because only files of kind "
            f"{', '.join(BUILDERS)} are; convert it, or move it elsewhere"
        )
    if not files:
        raise ValueError(f"data.path={data.path}: the folder has no file of kind {', '.join(BUILDERS)}; add one")
    if len({BUILDERS.get(kind) for kind in kinds}) > 1:
        raise ValueError(f"data.path={data.path}: the folder mixes {', '.join(kinds)}; give each kind its own folder")
    return files


def _is_data(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    return (
        file.is_file() and file.name not in FILES_TO_IGNORE and not any(part.startswith((".", "_")) for part in parts)
    )


UNSHUFFLED_BLOCK = 1024
"""Documents per block of a stream that is not shuffled."""
MOST_TOKENS = 1 << 20
"""Number of tokens of a conversation within which its first answer is searched."""

Rows: TypeAlias = FileRows | Dataset | IterableDataset


def open_source(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool, now: datetime | None = None
) -> Source:
    """Open the training documents, or for evaluation the documents of ``data.eval_split`` or the held-out ones.

    Data that is not streamed is tokenised here unless ``data.cache_dir`` has the result already.

    Args:
        evaluation: open the data for evaluation.
        now: the time that a chat template may show. None means the current time.

    Raises:
        ValueError: the data cannot be read or encoded, or nothing is held out.
    """
    own_split = bool(data.eval_split) and data.kind is not DataKind.corpus
    if evaluation and not (own_split or data.sources) and data.eval_fraction <= 0:
        raise ValueError(
            f"data.eval_fraction={data.eval_fraction}: nothing is held out for evaluation; "
            "set it (0.02 is common), or data.eval_split, or train.eval_every=0"
        )
    if data.sources:
        sources = for_each_source(data, partial(open_source, tokenizer=tokenizer, evaluation=evaluation, now=now))
        parts = [
            Weighted(source=source, weight=each.weight, epochs=1 if evaluation else each.epochs)
            for source, each in zip(sources, data.sources, strict=True)
        ]
        return MixedSource(parts, block_documents=_block_documents(data, evaluation))
    cache = Path(data.cache_dir).expanduser()
    fraction = 0.0 if own_split else data.eval_fraction
    part = Part(fraction=fraction, evaluation=evaluation and fraction > 0)
    if data.kind is DataKind.corpus:
        corpus, encoder = load_corpus(), encoder_of(data, tokenizer, ("text",))
        rows = Dataset.from_dict({"text": list(corpus.texts)})
        tokens = tokenised(rows, encoder, name=corpus.sha256, cache=cache)
        return LoadedSource(tokens, encoder, name=corpus.description, part=part)
    rows = _read(data, "eval_split" if evaluation and own_split else "split", cache)
    fields = _fields(data, rows)
    if not data.streaming:
        encoder = encoder_of(data, tokenizer, fields, now)
        name = rows.fingerprint if isinstance(rows, FileRows) else rows._fingerprint
        tokens = tokenised(_plain(rows, fields), encoder, name=name, cache=cache)
        return LoadedSource(tokens, encoder, name=without_credentials(data.path), part=part)
    encoder = encoder_of(data, deepcopy(tokenizer), fields, now)  # a thread uses it, and its settings are mutable
    return StreamedSource(
        rows.streamed() if isinstance(rows, FileRows) else _selected(rows, fields),
        encoder,
        name=without_credentials(data.path),
        block_documents=_block_documents(data, evaluation),
        part=part,
        typed=not isinstance(rows, FileRows),
    )


def _block_documents(data: DataConfig, evaluation: bool) -> int:
    shuffled = data.shuffle and not evaluation
    return data.shuffle_buffer if shuffled else min(data.shuffle_buffer, UNSHUFFLED_BLOCK)


def encode_first(data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, now: datetime | None = None) -> Document:
    """Encode the first row of local data that has something to learn, so that errors are found early.

    The document is truncated to the sequence length, even if training would pack the rest into other sequences.

    Returns:
        The document, of a mixture that of its first source.

    Raises:
        ValueError: a row cannot be read or encoded, or no row of a source has anything to learn.
    """
    if data.sources:
        return for_each_source(data, partial(encode_first, tokenizer=tokenizer, now=now))[0]
    _, fields, rows = open_rows(replace(data, streaming=True), Path(data.cache_dir).expanduser())
    encoder = encoder_of(replace(data, packing=False), tokenizer, fields, now)
    first = None
    for number, row in enumerate(rows):
        first = first or row
        columns = encoder([encoder.value_of(row)], [number])
        if columns["length"][0]:
            ids = np.asarray(columns["input_ids"][0], dtype=np.int64)
            return Document(ids, np.asarray(columns["labels"][0], dtype=np.int64) if "labels" in columns else ids)
    if data.kind is DataKind.text:
        raise ValueError(f"data.path={data.path}: not one document with text; give it some")
    longer = encoder_of(replace(data, sequence_length=MOST_TOKENS), tokenizer, fields, now)
    labels = longer([longer.value_of(first)], [0])["labels"][0] if first else []
    needed = next((f"; the first begins with token {n + 1}" for n, t in enumerate(labels) if t != IGNORED), "")
    raise ValueError(
        f"data.sequence_length={data.sequence_length}: every answer of {data.path} lies behind that many tokens and "
        f"would be cut away{needed}; raise it"
    )


def open_rows(
    data: DataConfig, cache: Path, option: str = "split"
) -> tuple[list[str], tuple[str, ...], Iterable[Mapping[str, Any]]]:
    """Return the column names of ``data.path``, the columns to read, and the rows.

    Args:
        option: the setting that names the split.

    Raises:
        ValueError: the data cannot be read.
    """
    rows = _read(data, option, cache)
    fields = _fields(data, rows)
    return list(rows.column_names or ()), fields, _plain(rows, fields)


def _plain(rows: Rows, fields: tuple[str, ...]) -> Iterable[Mapping[str, Any]]:
    """Return the rows without values that a table's types have added."""
    return rows if isinstance(rows, FileRows) else map(without_nulls, _selected(rows, fields))


def _selected(rows: Dataset | IterableDataset, fields: tuple[str, ...]) -> Dataset | IterableDataset:
    """Return a table with only the columns to read."""
    names = rows.column_names
    return rows if names is None else rows.select_columns([name for name in names if name in (*fields, TOOLS)])


def _fields(data: DataConfig, rows: Rows) -> tuple[str, ...]:
    """Return the columns of ``rows`` to read. Raise ValueError if ``rows`` do not have the configured column."""
    if data.kind is DataKind.preference:
        names = rows.column_names or list(next(iter(rows), dict.fromkeys(COLUMNS)))
        if found := pair_columns(names):
            return found
        raise ValueError(f"data.path={data.path}: no columns chosen and rejected, but {', '.join(names)}; add them")
    chat = data.kind is DataKind.chat
    option = "messages_field" if chat else "text_field"
    field = getattr(data, option)
    names = rows.column_names or list(next(iter(rows), {field: None}))
    if not (fields := chat_columns(names, field) if chat else (field,) if field in names else ()):
        raise ValueError(
            f"data.{option}={field}: {data.path} has no such field, but {', '.join(names)}; name one of them"
        )
    return fields


def encoder_of(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, fields: tuple[str, ...], now: datetime | None = None
) -> Encoder:
    """Return the encoder of ``fields`` of a source's rows. ``now`` is the time that a chat template may show."""
    if data.kind is DataKind.chat:
        return ChatEncoder(tokenizer, fields, template=data.chat_template, limit=data.sequence_length, now=now)
    if data.kind is DataKind.preference:
        return PairEncoder(tokenizer, template=data.chat_template, limit=data.sequence_length, now=now)
    return TextEncoder(tokenizer, fields[0], limit=None if data.packing else data.sequence_length)


def _read(data: DataConfig, option: str, cache: Path) -> Rows:
    """Open one split of ``data.path``. ``option`` is the setting that names the split."""
    location = locate(data)
    split = getattr(data, option)
    try:
        if location.saved:
            return _saved(location, split, streaming=data.streaming)
        is_hub = location.path is None and not location.files
        files = hub_files(data, split, cache) if is_hub else _files(data, location, split)
        if files is not None:
            return FileRows(files, columns_of(data))
        name = data.name or None
        return load_dataset(
            data.path, name=name, split=split, streaming=data.streaming, cache_dir=str(cache / "datasets")
        )
    except (OSError, ValueError, KeyError, ImportError, DatasetsError) as error:
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ValueError(
            f"data.path={data.path}: split {split!r} cannot be read ({reason}); check data.path, data.name and "
            f"data.{option}"
        ) from error


def columns_of(data: DataConfig) -> tuple[str, ...]:
    """Return all columns from which a row may be read."""
    if data.kind is DataKind.preference:
        return PAIR_COLUMNS
    return read_columns(data.messages_field) if data.kind is DataKind.chat else (data.text_field,)


def _files(data: DataConfig, location: Location, split: str) -> tuple[Path | str, ...]:
    """Return the files of a split.

    All files of a URL are of the split ``train``.
    """
    if location.path is None or location.path.is_file():
        found: Mapping[str, tuple[Path | str, ...]] = {"train": location.files}
    else:
        found = splits_of(location.path, data.name)
    if split not in found:
        raise ValueError(f"there is {', '.join(found)}")
    return found[split]


def unread_files(data: DataConfig, location: Location) -> list[str]:
    """Return the files of a folder that are in none of the splits that training and evaluation read."""
    if location.path is None or len(location.files) < 2:
        return []
    with suppress(OSError, ValueError, DatasetsError):  # whoever opens it gets the error
        splits = splits_of(location.path, data.name)
        read = {Path(file).resolve() for name in (data.split, data.eval_split) for file in splits.get(name, ())}
        return [str(file) for file in location.files if Path(file).resolve() not in read]
    return []


def _saved(location: Location, split: str, *, streaming: bool) -> Rows:
    dataset = load_from_disk(str(location.path))
    if isinstance(dataset, DatasetDict):
        dataset = dataset[split]
    return dataset.to_iterable_dataset() if streaming else dataset


_PREFIX = "hf://datasets/"


def hub_files(data: DataConfig, split: str, cache: Path) -> tuple[Path | str, ...] | None:
    """Return the files of a split whose types `datasets` would guess, JSON and CSV, all of one revision.

    For a stream they are URLs. Otherwise they are downloaded, and their local paths are returned. If the hub cannot be
    reached, the list of files is that of the previous run.

    Args:
        cache: folder that stores the list of files.

    Returns:
        None if `datasets` must read the data set itself: its files are of another kind or need its settings, or the
        split is a slice or a sum of splits. Also None if the hub cannot be reached and no list is stored.

    Raises:
        ValueError: the data set has no such split.
        OSError: a file cannot be downloaded.
    """
    known, key = JsonCache(cache / "hub.json"), f"{data.path}, {data.name}"
    try:
        builder = load_dataset_builder(data.path, name=data.name or None, cache_dir=str(cache / "datasets"))
    except (OSError, ValueError, DatasetsError):
        splits = known.read().get(key)
    else:
        if not _is_plain(builder.config):
            return None
        splits = {str(name): list(map(str, files)) for name, files in (builder.config.data_files or {}).items()}
        with suppress(OSError):  # the next run downloads the list again
            known.add({key: splits})
    if not splits or any(mark in split for mark in "[+"):
        return None
    if split not in splits:
        raise ValueError(f"there is {', '.join(splits)}")
    return tuple(splits[split] if data.streaming else map(_fetched, splits[split]))


def _is_plain(config: BuilderConfig) -> bool:
    """True for JSON and CSV that are read in the usual way, without a setting of the data set's page."""
    if isinstance(config, CsvConfig):
        return config.pd_read_csv_kwargs in [CsvConfig(sep=each).pd_read_csv_kwargs for each in SEPARATORS.values()]
    return isinstance(config, JsonConfig) and config.field is None


def _fetched(url: str) -> Path | str:
    """Download a file from the hub, and return its path, which has the same name. Return other URLs unchanged."""
    if not url.startswith(_PREFIX):
        return url
    repository, _, rest = url.removeprefix(_PREFIX).partition("@")
    revision, _, name = rest.partition("/")
    return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision))
