"""Location of a model: a folder, or a hub name with its folder in the cache."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import cached_file


def is_local(path: str) -> bool:
    """True if ``model.path`` means a folder rather than a hub name."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or Path(path).expanduser().exists()


def source_of(path: str) -> str:
    """Return the name or folder from which transformers loads ``model.path``."""
    return str(Path(path).expanduser()) if is_local(path) else path


def weights_folder(path: str) -> Path:
    """Return the folder of ``model.path``, which for a hub name is in the cache."""
    if is_local(path):
        return Path(path).expanduser()
    found = cached_file(path, "config.json")
    assert found is not None
    return Path(found).parent
