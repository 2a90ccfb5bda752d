"""Open the source that a data configuration names, with Hugging Face `datasets`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data.chat import ChatEncoder
from weft.engine.data.corpus import load_corpus
from weft.engine.data.documents import Document, Part
from weft.engine.data.encode import Encoder, TextEncoder
from weft.engine.data.location import BUILDERS, Location, locate
from weft.engine.data.messages import chat_columns
from weft.engine.data.source import LoadedSource, Source, StreamedSource, tokenised

UNSHUFFLED_BLOCK = 1024
"""Documents to pack together if a stream is not shuffled."""


def open_source(data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool) -> Source:
    """Open the training documents, or for evaluation ``data.eval_split`` or the held-out documents.

    Loaded data is tokenised here unless ``data.cache_dir`` already has the result.

    Raises:
        ValueError: the data cannot be read or encoded, or nothing is held out.
    """
    own_split = bool(data.eval_split) and data.kind is not DataKind.corpus
    if evaluation and not own_split and data.eval_fraction <= 0:
        raise ValueError(
            f"data.eval_fraction={data.eval_fraction}: nothing is held out for evaluation; "
            "set it (0.02 is common), or data.eval_split, or train.eval_every=0"
        )
    cache = Path(data.cache_dir).expanduser()
    fraction = 0.0 if own_split else data.eval_fraction
    part = Part(fraction=fraction, evaluation=evaluation and fraction > 0)
    if data.kind is DataKind.corpus:
        corpus, encoder = load_corpus(), _encoder(data, tokenizer, ("text",))
        rows = Dataset.from_dict({"text": list(corpus.texts)})
        tokens = tokenised(rows, encoder, name=corpus.sha256, cache=cache)
        return LoadedSource(tokens, encoder, name=corpus.description, part=part)
    rows = _read(data, "eval_split" if evaluation and own_split else "split", cache)
    fields = _fields(data, rows)
    if isinstance(rows, Dataset):
        encoder = _encoder(data, tokenizer, fields)
        tokens = tokenised(rows, encoder, name=rows._fingerprint, cache=cache)
        return LoadedSource(tokens, encoder, name=data.path, part=part)
    encoder = _encoder(data, deepcopy(tokenizer), fields)  # a thread uses it, and a tokenizer's settings are mutable
    shuffled = data.shuffle and not evaluation
    block = data.shuffle_buffer if shuffled else min(data.shuffle_buffer, UNSHUFFLED_BLOCK)
    return StreamedSource(rows, encoder, name=data.path, block_documents=block, part=part)


def encode_first(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Document:
    """The first row of local data as training will see it, to find early what tokenizer and template refuse.

    Raises:
        ValueError: the row cannot be read or encoded.
    """
    rows = _read(replace(data, streaming=True), "split", Path(data.cache_dir).expanduser())
    row = next(iter(rows))
    encoder = _encoder(data, tokenizer, _fields(data, rows))
    columns = encoder([encoder.value_of(row)], [0])
    ids = np.asarray(columns["input_ids"][0], dtype=np.int64)
    return Document(ids, np.asarray(columns["labels"][0], dtype=np.int64) if "labels" in columns else ids)


def _fields(data: DataConfig, rows: Dataset | IterableDataset) -> tuple[str, ...]:
    """The columns of ``rows`` to read.

    Raises:
        ValueError: there are none such.
    """
    chat = data.kind is DataKind.chat
    option = "messages_field" if chat else "text_field"
    field = getattr(data, option)
    names = rows.column_names
    if names is None and chat:
        names = list(next(iter(rows), {field: None}))
    if names is None:
        return (field,)
    if not (fields := chat_columns(names, field) if chat else (field,) if field in names else ()):
        raise ValueError(
            f"data.{option}={field}: {data.path} has no such field, but {', '.join(names)}; name one of them"
        )
    return fields


def _encoder(data: DataConfig, tokenizer: PreTrainedTokenizerBase, fields: tuple[str, ...]) -> Encoder:
    if data.kind is DataKind.chat:
        return ChatEncoder(tokenizer, fields, template=data.chat_template, limit=data.sequence_length)
    return TextEncoder(tokenizer, fields[0], limit=None if data.packing else data.sequence_length)


def _read(data: DataConfig, option: str, cache: Path) -> Dataset | IterableDataset:
    """One split of ``data.path``, loaded or streamed; ``option`` is the field that names the split."""
    location = locate(data)
    split = getattr(data, option)
    try:
        if location.saved:
            return _saved(location, split, streaming=data.streaming)
        path, options = _request(data, location)
        return load_dataset(path, split=split, streaming=data.streaming, cache_dir=str(cache / "datasets"), **options)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ValueError(
            f"data.path={data.path}: split {split!r} cannot be read ({reason}); check data.path, data.name and "
            f"data.{option}"
        ) from error


def _request(data: DataConfig, location: Location) -> tuple[str, dict[str, object]]:
    """Arguments for `load_dataset`; a .txt file is one document, because single lines lose their context."""
    if location.path is None:
        return data.path, {"name": data.name or None}
    whole = {"sample_by": "document"} if location.files[0].suffix == ".txt" else {}
    if location.path.is_file():
        return BUILDERS[location.path.suffix], {"data_files": str(location.path), **whole}
    return str(location.path), {"name": data.name or None, **whole}


def _saved(location: Location, split: str, *, streaming: bool) -> Dataset | IterableDataset:
    dataset = load_from_disk(str(location.path))
    if isinstance(dataset, DatasetDict):
        dataset = dataset[split]
    return dataset.to_iterable_dataset() if streaming else dataset
