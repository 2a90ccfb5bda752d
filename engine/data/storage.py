"""Files of data on this machine, and in object storage through fsspec."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import fsspec
from fsspec.core import url_to_fs

MOST_ROW_BYTES = 1 << 28
"""Largest line, or file of an archive."""
HUB = "hf://"


def is_url(path: str) -> bool:
    """True if ``path`` is a URL, such as s3://bucket/folder."""
    return "://" in path  # a path has no empty part


def suffix_of(file: Path | str) -> str:
    """Return the suffix of a path or URL, in lower case."""
    return PurePosixPath(str(file)).suffix.lower()


def remote_files(url: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sorted URLs of a file, of files that match a pattern, or of files with ``suffixes`` in a folder.

    Hidden files, and files whose names begin with an underscore, are left out of folders.

    Raises:
        ValueError: there is no such file, or the storage cannot be reached.
    """
    try:
        storage, path = url_to_fs(url)
        if any(letter in path for letter in "*?["):
            found = [name for name in storage.glob(path) if suffix_of(name) in suffixes]
        elif storage.isfile(path):
            if suffix_of(path) not in suffixes:
                raise ValueError(f"files of this kind are not read; convert it to one of {', '.join(suffixes)}")
            return (url,)
        else:
            found = [name for name in storage.find(path) if suffix_of(name) in suffixes and not _is_hidden(name, path)]
    except (OSError, ImportError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"data.path={url}: cannot be read ({reason}); check the address and the credentials of this host, and "
            "install the package for this storage, such as s3fs or gcsfs"
        ) from error
    if not found:
        raise ValueError(f"data.path={url}: there is no file of kind {', '.join(suffixes)}; check the address")
    return tuple(sorted(storage.unstrip_protocol(name) for name in found))


def open_file(file: Path | str) -> AbstractContextManager[BinaryIO]:
    """Open a file. Its suffix determines how it is decompressed."""
    local = isinstance(file, Path)
    opened: AbstractContextManager[BinaryIO] = (fsspec.filesystem("file").open if local else fsspec.open)(
        str(file), "rb", compression="infer"
    )
    return opened


def version_of(file: Path | str) -> object:
    """Return a value that changes when the contents of a file may have changed. A URL of the hub has its revision."""
    if isinstance(file, Path):
        found = file.stat()
        return str(file.resolve()), found.st_size, found.st_mtime_ns
    if file.startswith(HUB):
        return file
    storage, path = url_to_fs(file)
    return file, storage.ukey(path)


def _is_hidden(name: str, folder: str) -> bool:
    parts = PurePosixPath(name.removeprefix(folder)).parts
    return any(part.startswith((".", "_")) for part in parts)
