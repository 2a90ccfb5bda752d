"""Open the source that a data configuration names, with Hugging Face `datasets`."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data.chat import ChatEncoder
from weft.engine.data.corpus import load_corpus
from weft.engine.data.documents import Part
from weft.engine.data.encode import Encoder, TextEncoder
from weft.engine.data.location import BUILDERS, Location, locate
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
    encoder, cache = _encoder(data, tokenizer), Path(data.cache_dir).expanduser()
    fraction = 0.0 if own_split else data.eval_fraction
    part = Part(fraction=fraction, evaluation=evaluation and fraction > 0)
    if data.kind is DataKind.corpus:
        corpus = load_corpus()
        rows = Dataset.from_dict({encoder.field: list(corpus.texts)})
        tokens = tokenised(rows, encoder, name=corpus.sha256, cache=cache)
        return LoadedSource(tokens, encoder, name=corpus.description, part=part)
    rows = _read(data, "eval_split" if evaluation and own_split else "split", cache)
    if rows.column_names is not None and encoder.field not in rows.column_names:
        option = "messages_field" if data.kind is DataKind.chat else "text_field"
        raise ValueError(
            f"data.{option}={encoder.field}: {data.path} has no such field, but {', '.join(rows.column_names)}; "
            "name one of them"
        )
    if isinstance(rows, Dataset):
        tokens = tokenised(rows, encoder, name=rows._fingerprint, cache=cache)
        return LoadedSource(tokens, encoder, name=data.path, part=part)
    encoder = _encoder(data, deepcopy(tokenizer))  # a thread uses it, and a tokenizer's settings are mutable
    shuffled = data.shuffle and not evaluation
    block = data.shuffle_buffer if shuffled else min(data.shuffle_buffer, UNSHUFFLED_BLOCK)
    return StreamedSource(rows, encoder, name=data.path, block_documents=block, part=part)


def _encoder(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    if data.kind is DataKind.chat:
        return ChatEncoder(tokenizer, data.messages_field, template=data.chat_template, limit=data.sequence_length)
    field = "text" if data.kind is DataKind.corpus else data.text_field
    return TextEncoder(tokenizer, field, limit=None if data.packing else data.sequence_length)


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
