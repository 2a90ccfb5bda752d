"""Samples of WebDataset shards: files of a tar archive with the same name up to its first dot."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.engine.data.storage import MOST_ROW_BYTES, open_file

TEXT_KINDS = ("txt", "text")
"""Suffixes of files whose content is the column ``text``."""


class SampleFault(ValueError):
    """Error of a sample, or of the archive if ``where`` is empty."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where, self.what = where, what


def read_samples(file: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the samples of a shard with their names. The archive is read once, from its beginning.

    The keys of an object in ``NAME.json`` are columns, and ``NAME.txt`` is the column ``text``. Other files are not
    read. Their columns are null.

    Raises:
        SampleFault: the file is not a tar archive, or a sample cannot be decoded.
    """
    try:
        with open_file(file) as opened, tarfile.open(fileobj=opened, mode="r|") as shard:
            current, row = "", dict[str, Any]()
            for member in shard:
                folder, _, name = member.name.rpartition("/")
                stem, _, kind = name.partition(".")
                sample = f"{folder}/{stem}" if folder else stem
                if not member.isfile() or not stem:
                    continue
                if sample != current and row:
                    yield f"sample {current}", row
                    row = {}
                current = sample
                if kind in ("json", *TEXT_KINDS) and member.size > MOST_ROW_BYTES:  # it may have holes
                    raise SampleFault(f"sample {sample}", f"more than {MOST_ROW_BYTES >> 20} MiB; split it")
                content = shard.extractfile(member) if kind in ("json", *TEXT_KINDS) else None
                row |= {kind: None} if content is None else _columns(content.read(), kind, f"sample {sample}")
            if row:
                yield f"sample {current}", row
    except tarfile.TarError as error:
        raise SampleFault("", f"not a tar archive ({error}); write it again") from error


def _columns(content: bytes, kind: str, where: str) -> dict[str, Any]:
    try:
        text = content.decode("utf-8-sig")
        if kind in TEXT_KINDS:
            return {"text": text}
        value = json.loads(text)
    except UnicodeDecodeError:
        raise SampleFault(where, "not UTF-8; convert the file") from None
    except (ValueError, RecursionError) as error:
        raise SampleFault(where, f"not JSON ({str(error).splitlines()[0]}); correct the file") from None
    return value if isinstance(value, dict) else {kind: value}
