"""Location of `data.path`: a file, a folder of files, or a hub name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.conf.schema import DataConfig

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
"""The Hugging Face `datasets` builder of each kind of file."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Location of a data set's rows.

    Attributes:
        name: ``data.path`` as configured.
        path: the file or folder, or None for a hub name.
        files: sorted data files. Empty for a hub name, and for a folder that `Dataset.save_to_disk` wrote.
        saved: whether `Dataset.save_to_disk` wrote the folder.
    """

    name: str
    path: Path | None
    files: tuple[Path, ...] = ()
    saved: bool = False


def locate(data: DataConfig) -> Location:
    """Find out what ``data.path`` is.

    Raises:
        ValueError: the path does not exist, has an unsupported suffix, or is a folder without data files or with
            several kinds of them.
    """
    path = Path(data.path).expanduser()
    if path.is_dir():
        return _folder(data, path)
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise ValueError(
                f"data.path={data.path}: files of kind {path.suffix or '(no suffix)'} are not read; "
                f"convert it to one of {', '.join(BUILDERS)}"
            )
        return Location(name=data.path, path=path, files=(path,))
    if not data.path or data.path[0] in "./~" or path.suffix in BUILDERS or data.path.count("/") > 1:
        raise ValueError(f"data.path={data.path}: does not exist; give a file, a folder, or a hub name as owner/name")
    return Location(name=data.path, path=None)


def _folder(data: DataConfig, path: Path) -> Location:
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return Location(name=data.path, path=path, saved=True)
    files = tuple(sorted(file for file in path.rglob("*") if file.suffix in BUILDERS and _is_data(file, path)))
    kinds = sorted({file.suffix for file in files})
    if not files:
        raise ValueError(f"data.path={data.path}: the folder has no file of kind {', '.join(BUILDERS)}; add one")
    if len({BUILDERS[kind] for kind in kinds}) > 1:
        raise ValueError(f"data.path={data.path}: the folder mixes {', '.join(kinds)}; give each kind its own folder")
    return Location(name=data.path, path=path, files=files)


def _is_data(file: Path, folder: Path) -> bool:
    return file.is_file() and not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
