"""Checkpoint errors, which name the file, the problem and a remedy."""

from __future__ import annotations

import errno
from pathlib import Path

OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of the operating system for a full disk."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read, or applied to this model."""


class OtherBaseError(CheckpointError):
    """A checkpoint whose run has another base model than this run. Older checkpoints are not tried."""


class StorageError(CheckpointError):
    """Storage is read-only, failing or unavailable, possibly only temporarily."""


class NoSpaceError(StorageError):
    """There is not enough space for a checkpoint."""


BY_NAME = {each.__name__: each for each in (CheckpointError, OtherBaseError, StorageError, NoSpaceError)}
"""Classes of errors by the name under which a rank reports them to others."""


def explain(folder: Path, error: Exception) -> CheckpointError:
    """Return the `CheckpointError` for an exception raised while reading or writing in ``folder``."""
    if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
        return NoSpaceError(
            f"checkpoint in {folder}: no space left ({error.strerror}); earlier checkpoints are unchanged. Free "
            "space or raise the quota, lower checkpoint.keep, or choose another train.output_dir"
        )
    if isinstance(error, OSError):
        return StorageError(f"checkpoint in {folder}: {error}; earlier checkpoints are unchanged")
    return CheckpointError(f"checkpoint in {folder}: {type(error).__name__}: {error}")
