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
    folder = folder.resolve()
    with _without_patterns(folder) as plain:

        def own(file: Path) -> Path:
            return folder / file.relative_to(plain) if file.is_relative_to(plain) else file

        listed = load_dataset_builder(str(plain), name=name or None).config.data_files
        return {str(split): tuple(own(Path(file)) for file in files) for split, files in listed.items()}


@contextmanager
def _without_patterns(folder: Path) -> Iterator[Path]:
    """Yield a folder with links to the same files whose path has no pattern, because `datasets` would expand it."""
    if not _PATTERN.search(str(folder)):
        yield folder
        return
    with TemporaryDirectory(prefix="weft-") as temporary:
        links = Path(temporary).resolve()
        for file in folder.rglob("*"):
            if file.is_file():
                link = links / file.relative_to(folder)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file)
        yield links
