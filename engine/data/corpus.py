"""The embedded corpus: the standard library's sources and help topics, for training without a network."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings"}
)
"""Folders to leave out: tests, third-party packages, and code-page tables."""
_MACHINE_FILES = ("config-", "_sysconfigdata")
"""Prefixes of files that differ between builds of the same Python."""


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order: modules by path, then help topics by name.

    Their contents vary with the Python version. ``sha256`` identifies them.
    """

    texts: tuple[str, ...]

    @cached_property
    def sha256(self) -> str:
        """Hash of the documents and their boundaries, in hex."""
        digest = hashlib.sha256()
        for text in self.texts:
            digest.update(text.encode())
            digest.update(b"\0")
        return digest.hexdigest()

    @cached_property
    def num_bytes(self) -> int:
        """Size of all documents in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)

    @property
    def description(self) -> str:
        """Size and hash of the corpus, as text."""
        return f"embedded corpus ({self.num_bytes / 1e6:.1f} MB, sha256 {self.sha256[:8]})"


def load_corpus(stdlib: Path | None = None) -> Corpus:
    """Read the embedded corpus, about 700 documents and 11 MB in half a second.

    Args:
        stdlib: folder with the modules. None means this interpreter's.

    Raises:
        ValueError: the folder has no sources, as in a stripped or zipped Python.
    """
    from pydoc_data.topics import topics

    root = stdlib or Path(sysconfig.get_path("stdlib"))
    files = list(_modules(root))
    if not files:
        raise ValueError(f"data.kind=corpus: {root} holds no Python sources; use a full Python or data.kind=text")
    modules = [path.read_text(encoding="utf-8") for path in sorted(files, key=lambda path: path.as_posix())]
    documents = [*modules, *(topics[name] for name in sorted(topics))]
    return Corpus(tuple(text for text in documents if text.strip()))


def _modules(root: Path) -> Iterator[Path]:
    """Yield the modules below a folder.

    Skipped folders are not searched, because they may contain thousands of files.
    """
    for folder, folders, names in os.walk(root):
        passed_over = _MACHINE_FILES if Path(folder) == root else ()
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(passed_over)]
        yield from (Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(passed_over))
