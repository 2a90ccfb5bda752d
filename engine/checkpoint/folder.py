"""The folder of checkpoints: which are whole, which is the newest, which may go."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from weft.engine.checkpoint import durable
from weft.engine.checkpoint.errors import CheckpointError
from weft.engine.checkpoint.manifest import MANIFEST, Manifest, read_manifest

TEMPORARY = ".tmp"
"""Suffix of what is being written or removed: never a checkpoint."""
REPLACED = ".old"
"""Suffix of a checkpoint while another of the same step takes its place."""
_NAME = re.compile(r"step-(\d+)(?:\.old)?")

log = logging.getLogger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """``step-00000120`` in ``folder``."""
    return folder / f"step-{step:08d}"


def newest(folder: Path) -> Path | None:
    """The checkpoint in ``folder`` that was written last and is whole; None if there is none.

    Whole means: its manifest matches its checksum, and every file is there with its size. (The
    bytes of tensors are checked when they are read.) Damaged ones are named in a warning.
    ``folder`` may also be a checkpoint itself.
    """
    return next((path for path, _ in whole(folder)), None)


def whole(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Every whole checkpoint in ``folder``, or ``folder`` itself, the last written first."""
    found = []
    for path in candidates(folder):
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError as error:
            log.warning("skipped a damaged checkpoint: %s", error)
    # Order of writing, not of steps: after going back to an earlier step, later steps are of an abandoned run.
    yield from sorted(found, key=lambda item: item[1].serial, reverse=True)


def candidates(folder: Path) -> list[Path]:
    """Everything in ``folder`` that has a checkpoint's name."""
    if (folder / MANIFEST).exists():
        return [folder]
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def clean(folder: Path) -> None:
    """Remove what a crash left half written or half removed."""
    for path in folder.glob(f"step-*{TEMPORARY}"):
        durable.remove(path)


def put(temporary: Path, target: Path) -> None:
    """Give a finished checkpoint its name; one of the same step stays whole until then."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        discard(replaced)
        durable.rename(target, replaced)
    durable.rename(temporary, target)
    discard(replaced)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` whole checkpoints written last, damaged ones too; 0 keeps all."""
    if keep == 0:
        return
    kept = {path for path, _ in list(whole(folder))[:keep]}
    for path in candidates(folder):
        if path not in kept:
            discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint so that at no instant a damaged one has a checkpoint's name."""
    if path.exists():
        gone = path.with_name(path.name + TEMPORARY)
        durable.remove(gone)
        durable.rename(path, gone)
        durable.remove(gone)


def check_space(folder: Path, bytes_needed: int, *, free_bytes: int | None = None) -> None:
    """Check that a checkpoint fits on the disk.

    Args:
        free_bytes: instead of asking the file system.

    Raises:
        CheckpointError: it does not.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free if free_bytes is None else free_bytes
    if bytes_needed > free:
        raise CheckpointError(
            f"checkpoint in {folder}: it needs {_size(bytes_needed)}, {_size(free)} are free; free space, lower "
            "checkpoint.keep, or choose another train.output_dir"
        )


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
