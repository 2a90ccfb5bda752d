"""Files of data on this machine, and in object storage through fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import infer_compression

from weft.conf.host.private import without_credentials

MOST_ROW_BYTES = 1 << 28
"""Largest line, or file of an archive."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
COMPRESSED = (".gz", ".bz2", ".xz")
"""Suffixes of compressed files that are read. Of .zst, zstandard reads a file that was cut without an error."""
BUILDERS = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "json"),
    **dict.fromkeys(SEPARATORS, "csv"),
    **{".parquet": "parquet", ".txt": "text", ".tar": "webdataset"},
}
"""The Hugging Face `datasets` builder of each kind of file."""
UNREAD = (
    *(".arrow", ".avro", ".feather", ".jsonlines", ".lz4", ".orc", ".pq", ".xls", ".xlsx", ".zip", ".zst", *COMPRESSED),
)
"""Kinds of files that hold rows but are not read. Other files of a folder, such as a README, are no data."""
HUB = "hf://"
_PARAMETERS = re.compile(r"[?#].*")
_PAGE = re.compile(r"https?://huggingface\.co/datasets/([\w.-]+/[\w.-]+)/?((tree|blob|viewer)/.*)?")


def is_url(path: str) -> bool:
    """True if ``path`` is a URL, such as s3://bucket/folder."""
    return "://" in path  # a path has no empty part


def name_of(file: Path | str) -> PurePosixPath:
    """Return a path or URL in lower case. Web addresses lose their parameters, such as a signature."""
    name = str(file).lower()
    return PurePosixPath(_PARAMETERS.sub("", name) if name.startswith(("http://", "https://")) else name)


def suffix_of(file: Path | str) -> str:
    """Return the suffix of a path or URL in lower case, and of a compressed file of lines the one before."""
    name = name_of(file)
    inner = PurePosixPath(name.stem).suffix if name.suffix in COMPRESSED else ""
    return inner if BUILDERS.get(inner) in ("json", "csv", "text") else name.suffix


def remote_files(url: str) -> tuple[str, ...]:
    """Return the sorted URLs of a file of data, of those that match a pattern, or of those in a folder.

    A name with a pattern's characters is a pattern only if there is no such file or folder. Hidden files, and files
    whose names begin with an underscore, are left out of folders.

    Raises:
        ValueError: there is no such file, or the storage cannot be reached.
    """
    if page := _PAGE.fullmatch(url):
        raise ValueError(f"data.path={url}: a page about a data set; give its hub name, data.path={page[1]}")
    suffixes = (*BUILDERS, *UNREAD)
    try:
        storage, path = url_to_fs(url)
        if storage.isfile(path):
            if suffix_of(path) not in suffixes:
                raise ValueError(f"files of this kind are not read; convert it to one of {', '.join(BUILDERS)}")
            return (url,)
        if any(letter in path for letter in "*?[") and not storage.isdir(path):
            found = [name for name in storage.glob(path) if suffix_of(name) in suffixes]
        else:
            found = [name for name in storage.find(path) if suffix_of(name) in suffixes and not _is_hidden(name, path)]
        if not found and (absent := _absence(storage, path)):
            raise absent
    except Exception as error:  # any: each storage has errors of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "check the address and the credentials of this host"
        if isinstance(error, ImportError):
            remedy = "install the package for this storage, such as s3fs, gcsfs, or requests and aiohttp"
        raise ValueError(f"data.path={url}: cannot be read ({reason}); {remedy}") from error
    if not found:
        raise ValueError(f"data.path={url}: the folder has no file of data; check the address")
    return tuple(sorted(storage.unstrip_protocol(name) for name in found))


def _absence(storage: AbstractFileSystem, path: str) -> Exception | None:
    """Return why there is nothing at a path, or None if there is an empty folder. `isfile` and `find` hide it."""
    try:
        storage.info(path)
    except FileNotFoundError as error:
        return FileNotFoundError(error.__cause__ or "there is no such file or folder")
    except Exception as error:
        return error
    return None


@contextmanager
def open_file(file: Path | str) -> Iterator[BinaryIO]:
    """Open a file. Its suffix determines how it is decompressed.

    Reading raises OSError where a file in storage ends before its size. Compressed files notice it themselves.
    """
    local, compression = isinstance(file, Path), infer_compression(str(name_of(file)))
    opening = fsspec.filesystem("file").open if local else fsspec.open
    with opening(str(file), "rb", compression=compression) as opened:
        size = None if local or compression else getattr(opened, "size", None)
        yield opened if size is None else cast(BinaryIO, _Whole(opened, size))


class _Whole(RawIOBase):
    """A file in storage, which ends at its size. fsspec's end where the storage sends no more bytes."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if count < len(buffer) and (left := self._size - self._file.tell()) > 0:
            raise OSError(f"{left} of its {self._size} bytes are missing; write it again")
        return count

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def version_of(file: Path | str) -> object:
    """Return a value that changes when the contents of a file may have changed. A URL of the hub has its revision."""
    if isinstance(file, Path):
        found = file.stat()
        return str(file.resolve()), found.st_size, found.st_mtime_ns
    if file.startswith(HUB):
        return file
    storage, path = url_to_fs(file)
    shown = without_credentials(file)
    return shown, storage.ukey(path) if shown == file else storage.size(path)  # a signature differs from run to run


def _is_hidden(name: str, folder: str) -> bool:
    parts = PurePosixPath(name.removeprefix(folder)).parts
    return any(part.startswith((".", "_")) for part in parts)
