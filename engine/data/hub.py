"""JSON files of data sets on the hub, which `weft.engine.data.rows` reads as it reads local ones."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from datasets import load_dataset_builder
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.json.json import Json
from huggingface_hub import hf_hub_download

from weft.conf.host.files import JsonCache
from weft.conf.schema import DataConfig

_PREFIX = "hf://datasets/"


def hub_files(data: DataConfig, split: str, cache: Path) -> tuple[Path | str, ...] | None:
    """Return the JSON files of a split: URLs of one revision for a stream, else paths to which they were fetched.

    Where the hub cannot be reached, they are those of the run before.

    Args:
        cache: folder for their names.

    Returns:
        None for data sets of other files, and for what only `datasets` makes of JSON files: a part of a split, or
        the rows that lie in a field.

    Raises:
        ValueError: there is no such split.
        OSError: a file cannot be fetched.
    """
    known, key = JsonCache(cache / "hub.json"), f"{data.path}, {data.name}"
    try:
        builder = load_dataset_builder(data.path, name=data.name or None, cache_dir=str(cache / "datasets"))
    except (OSError, ValueError, DatasetsError):
        splits = known.read().get(key)
    else:
        if not isinstance(builder, Json) or builder.config.field is not None:
            return None
        splits = {str(name): list(map(str, files)) for name, files in (builder.config.data_files or {}).items()}
        with suppress(OSError):  # the next run downloads the list again
            known.add({key: splits})
    if not splits or any(mark in split for mark in "[+"):
        return None
    if split not in splits:
        raise ValueError(f"there is {', '.join(splits)}")
    return tuple(splits[split] if data.streaming else map(_fetched, splits[split]))


def _fetched(url: str) -> Path | str:
    """The path of a file that was fetched from the hub, which keeps its name."""
    if not url.startswith(_PREFIX):
        return url
    repository, _, rest = url.removeprefix(_PREFIX).partition("@")
    revision, _, name = rest.partition("/")
    return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision))
