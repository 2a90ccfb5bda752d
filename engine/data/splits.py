"""Splits of a folder's data files, as `datasets` finds them by names of files and folders, or in a README."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import load_dataset_builder
from datasets.config import REPOCARD_FILENAME, REPOYAML_FILENAME

_PATTERN = re.compile(r"[][*?]|::")
_CONFIGURATIONS = (REPOCARD_FILENAME, REPOYAML_FILENAME)
"""Files of a folder that may name the files of each split."""


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
    the folder that is yielded has links to the files, and names with a second suffix in a README, too.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    upper = {file.suffix for file in files if file.suffix != file.suffix.lower()}
    if not _PATTERN.search(str(folder)) and not upper:
        yield folder, {}
        return
    with TemporaryDirectory(prefix="weft-") as temporary:
        links, originals = Path(temporary).resolve(), dict[str, Path]()
        for file in files:
            link = links / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.name in _CONFIGURATIONS and link.parent == links:
                link.write_text(_with_second_suffixes(file.read_text(encoding="utf-8"), upper), encoding="utf-8")
                continue
            link = link.with_name(_with_second_suffixes(link.name, upper))
            link.symlink_to(file)
            originals[str(link)] = file
        yield links, originals


def _with_second_suffixes(text: str, upper: Collection[str]) -> str:
    """Return a text in which names of files with a suffix in upper case have it in lower case, too."""
    for suffix in upper:
        text = re.sub(rf"{re.escape(suffix)}(?![\w.])", lambda found: found[0] + found[0].lower(), text)
    return text
