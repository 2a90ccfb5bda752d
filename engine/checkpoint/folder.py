"""The folder of checkpoints: which are whole, which is the newest, which may go."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from weft.engine.checkpoint import durable
from weft.engine.checkpoint.errors import CheckpointError, NoSpaceError
from weft.engine.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from weft.engine.checkpoint.shard_file import FILES

TEMPORARY = ".tmp"
"""Suffix of what is being written or removed: never a checkpoint."""
REPLACED = ".old"
"""Suffix of a checkpoint while another of the same step takes its place."""
LATEST = "latest"
"""Entry of ``Manifest.meta``: whether the checkpoint is one to resume from where none is named."""
_NAME = re.compile(r"step-(\d+)(?:\.old)?")
_OWN = "step-"
"""How the names begin that are given here; a tag's do not."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+@-]*")

log = logging.getLogger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """``step-00000120`` in ``folder``."""
    return folder / f"step-{step:08d}"


def checkpoint_folder(folder: Path, step: int, tag: str | None) -> Path:
    """Where a checkpoint is written: by its step, or under a name of the caller's.

    Raises:
        CheckpointError: the tag cannot be a folder's name, or could be taken for one of ours.
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
    """The checkpoint of that tag (or step folder's name), which may be waiting to be replaced.

    Raises:
        CheckpointError: there is none.
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
    """The name that a checkpoint has while it is written or removed; nobody else's begins and ends so."""
    return target.with_name((target.name if target.name.startswith(_OWN) else _OWN + target.name) + TEMPORARY)


def newest(folder: Path) -> Path | None:
    """The checkpoint in ``folder`` that was written last and is whole; None if there is none.

    Whole means: its manifest matches its checksum, and every file is there with its size. (The
    bytes of tensors are checked when they are read.) Damaged ones are named in a warning.
    ``folder`` may also be a checkpoint itself.
    """
    return next((path for path, _ in to_resume(folder)), None)


def to_resume(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """As `whole`, less those that were saved aside, with ``save_latest=False``."""
    for path, manifest in whole(folder):
        if path == folder or manifest.meta.get(LATEST, True):
            yield path, manifest


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
    return [path for path in folder.iterdir() if path.is_dir() and (_NAME.fullmatch(path.name) or _is_tagged(path))]


def _is_tagged(path: Path) -> bool:
    """Whether a folder that is not named by its step is one of ours: other things may lie beside checkpoints."""
    return not path.name.startswith(_OWN) and (path / MANIFEST).is_file() and any(path.glob(FILES))


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
    """Remove all but the ``keep`` whole checkpoints written last, damaged ones too; 0 keeps all.

    Those with a tag stay, and do not count.
    """
    if keep == 0:
        return
    kept = {path for path, _ in [item for item in whole(folder) if _NAME.fullmatch(item[0].name)][:keep]}
    for path in by_step(folder):
        if path not in kept:
            discard(path)


def by_step(folder: Path) -> list[Path]:
    """The candidates that have no tag."""
    return [path for path in candidates(folder) if _NAME.fullmatch(path.name)]


def discard(path: Path) -> None:
    """Remove a checkpoint so that at no instant a damaged one has a checkpoint's name."""
    if path.exists():
        gone = temporary_for(path)
        durable.remove(gone)
        durable.rename(path, gone)
        durable.remove(gone)


def check_space(folder: Path, bytes_needed: int, *, free_bytes: int | None = None) -> None:
    """Check that a checkpoint fits on the disk.

    Args:
        free_bytes: instead of asking the file system.

    Raises:
        NoSpaceError: it does not.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free if free_bytes is None else free_bytes
    if bytes_needed > free:
        raise NoSpaceError(
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
