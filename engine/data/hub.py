"""JSON files of data sets on the hub, which `weft.engine.data.rows` reads like local files."""

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
    """Return the JSON files of a split, all of one revision.

    For a stream they are URLs. Otherwise they are downloaded, and their local paths are returned. If the hub cannot be
    reached, the list of files is that of the previous run.

    Args:
        split: name of the split.
        cache: folder that stores the list of files.

    Returns:
        None if `datasets` must read the data set itself: its files are not JSON, the split is a slice or a sum of
        splits,
        or the rows are in a field of the JSON object. Also None if the hub cannot be reached and no list is stored.

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
    """Download a file from the hub, and return its path, which has the same name. Return other URLs unchanged."""
    if not url.startswith(_PREFIX):
        return url
    repository, _, rest = url.removeprefix(_PREFIX).partition("@")
    revision, _, name = rest.partition("/")
    return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision))
