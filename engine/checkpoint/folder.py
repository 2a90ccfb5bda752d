"""The folder of checkpoints: search, naming, quarantine and removal."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from weft.engine.checkpoint import durable
from weft.engine.checkpoint.durable import CheckpointError, NoSpaceError
from weft.engine.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from weft.engine.checkpoint.shard_file import FILES

TEMPORARY = ".tmp"
"""Suffix of folders that are being written or removed, which are never valid checkpoints."""
REPLACED = ".old"
"""Suffix of a checkpoint while another one of the same name replaces it."""
ASIDE = "suspect"
"""Folder for checkpoints with possibly corrupt numbers. A user who trusts one can move it back."""
LATEST = "latest"
"""Entry of ``Manifest.meta``: whether `newest` may choose this checkpoint."""
_NAME = re.compile(r"step-(\d+)(?:\.old)?")
_OWN = "step-"
"""Prefix of untagged checkpoints, which tags must not have."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+@-]*")

log = logging.getLogger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """Return ``step-00000120`` in ``folder``."""
    return folder / f"step-{step:08d}"


def checkpoint_folder(folder: Path, step: int, tag: str | None) -> Path:
    """Return the path of a checkpoint, named by its step or by the caller's tag.

    Raises:
        CheckpointError: the tag is not a valid folder name, or has a reserved prefix or suffix.
    """
    own = step_folder(folder, step)
    if tag is None or tag == own.name:
        return own
    if not _TAG.fullmatch(tag) or tag.startswith(_OWN) or tag.endswith((TEMPORARY, REPLACED)):
        raise CheckpointError(
            f"tag={tag!r}: not a name for a checkpoint; choose letters, digits and _.,=+@- that do not begin with "
            f"{_OWN!r} or end with {TEMPORARY!r} or {REPLACED!r}, such as best"
        )
    return folder / tag


def tagged(folder: Path, tag: str) -> Path:
    """Return the path of the checkpoint with a tag or with a step folder's name, also while it is being replaced.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    path = folder / tag
    if Path(tag).name != tag or tag.endswith(TEMPORARY):
        raise CheckpointError(f"tag={tag!r}: not the name of a checkpoint in {folder}")
    if not (path / MANIFEST).exists() and (path.with_name(tag + REPLACED) / MANIFEST).exists():
        return path.with_name(tag + REPLACED)
    if not (path / MANIFEST).exists():
        names = ", ".join(sorted(path.name for path in candidates(folder))) or "none"
        raise CheckpointError(f"tag={tag!r}: {folder} holds no such checkpoint; there are: {names}")
    return path


def temporary_for(target: Path) -> Path:
    """Return the temporary path of a checkpoint while it is written or removed."""
    return target.with_name((target.name if target.name.startswith(_OWN) else _OWN + target.name) + TEMPORARY)


def newest(folder: Path) -> Path | None:
    """Return the path of the complete checkpoint in ``folder`` that was written last, or None if there is none.

    Complete means that its manifest matches its checksum, and that every file exists with its size. Tensors are
    verified when they are read. Damaged checkpoints are reported in a warning. ``folder`` may also be a checkpoint
    itself.
    """
    return next((path for path, _ in to_resume(folder)), None)


def to_resume(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the same as `complete`, without checkpoints saved with ``save_latest=False``."""
    for path, manifest in complete(folder):
        if path == folder or manifest.meta.get(LATEST, True):
            yield path, manifest


def complete(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield path and manifest of complete checkpoints in ``folder`` (or ``folder`` itself), the last written first."""
    found = []
    for path in candidates(folder):
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError as error:
            log.warning("skipped a damaged checkpoint: %s", error)
    # By time of writing, not by step: after going back to an earlier step, later steps belong to an abandoned run.
    yield from sorted(found, key=lambda item: item[1].serial, reverse=True)


def candidates(folder: Path) -> list[Path]:
    """Return all folders in ``folder`` with a checkpoint's name, or ``folder`` itself if it is a checkpoint."""
    if (folder / MANIFEST).exists():
        return [folder]
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and (_NAME.fullmatch(path.name) or _is_tagged(path))]


def _is_tagged(path: Path) -> bool:
    """True if a folder is a tagged checkpoint. Other folders next to checkpoints may be unrelated."""
    return not path.name.startswith(_OWN) and (path / MANIFEST).is_file() and any(path.glob(FILES))


def newer(folder: Path, least_step: int) -> list[Path]:
    """Return the complete checkpoints of ``least_step`` steps or more, or none if there is no older checkpoint."""
    found = list(complete(folder))
    late = [path for path, manifest in found if manifest.step >= least_step]
    return late if len(late) < len(found) else []


def move_aside(path: Path) -> Path:
    """Move a checkpoint to the folder `ASIDE`, and return its new path. It replaces another one of its name there."""
    target = path.parent / ASIDE / path.name
    target.parent.mkdir(mode=0o700, exist_ok=True)
    if target.exists():
        durable.remove(target)
    os.rename(path, target)
    for folder in (target.parent, path.parent):
        durable.sync_folder(folder)
    return target


def clean(folder: Path) -> None:
    """Remove checkpoints that a crash has left partly written or partly removed."""
    for path in folder.glob(f"step-*{TEMPORARY}"):
        durable.remove(path)


def put(temporary: Path, target: Path) -> None:
    """Rename a finished checkpoint to its final name. A checkpoint that it replaces stays complete until then."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        discard(replaced)
        durable.rename(target, replaced)
    temporary.chmod(0o700 | target.parent.parent.stat().st_mode & 0o055)  # with the permissions of the run's folder
    durable.rename(temporary, target)
    discard(replaced)


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints except for the last ``keep`` complete ones. 0 keeps all.

    Tagged checkpoints are neither removed nor counted.
    """
    if keep == 0:
        return
    kept = {path for path, _ in [item for item in complete(folder) if _NAME.fullmatch(item[0].name)][:keep]}
    for path in by_step(folder):
        if path not in kept:
            discard(path)


def by_step(folder: Path) -> list[Path]:
    """Return the candidates without a tag."""
    return [path for path in candidates(folder) if _NAME.fullmatch(path.name)]


def discard(path: Path) -> None:
    """Rename a checkpoint to a temporary name, and remove it. So a partly removed checkpoint cannot be found."""
    if path.exists():
        gone = temporary_for(path)
        durable.remove(gone)
        durable.rename(path, gone)
        durable.remove(gone)


def check_space(folder: Path, bytes_needed: int, *, free_bytes: int | None = None) -> None:
    """Check that there is space for a checkpoint.

    Args:
        free_bytes: overrides the file system's value.

    Raises:
        NoSpaceError: there is not enough space.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free if free_bytes is None else free_bytes
    if bytes_needed > free:
        raise NoSpaceError(
            f"checkpoint in {folder}: needs {_size(bytes_needed)}, {_size(free)} are free; free space, lower "
            "checkpoint.keep, or choose another train.output_dir"
        )


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
