"""Splits of a folder's data files, as `datasets` finds them by names of files and folders, or in a README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import load_dataset_builder

_PATTERN = re.compile(r"[][*?]|::")


def splits_of(folder: Path, name: str) -> dict[str, tuple[Path, ...]]:
    """Return the files of each split of a folder.

    Args:
        name: a configuration in the folder's README. An empty string means its default.
    """
    with _plain(folder.resolve()) as (plain, originals):
        listed = load_dataset_builder(str(plain), name=name or None).config.data_files
        return {str(split): tuple(originals.get(file, Path(file)) for file in files) for split, files in listed.items()}


@contextmanager
def _plain(folder: Path) -> Iterator[tuple[Path, dict[str, Path]]]:
    """Yield a folder with the same files whose names `datasets` takes literally, and the files by their paths there.

    It would expand patterns in the folder's path, and leave out files whose suffix is in upper case. If there are any,
    the folder that is yielded has links to the files.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    if not _PATTERN.search(str(folder)) and all(file.suffix == file.suffix.lower() for file in files):
        yield folder, {}
        return
    with TemporaryDirectory(prefix="weft-") as temporary:
        links, originals = Path(temporary).resolve(), dict[str, Path]()
        for file in files:
            link = links / file.relative_to(folder)
            link = link.with_suffix(link.suffix.lower())
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(file)
                originals[str(link)] = file
        yield links, originals
