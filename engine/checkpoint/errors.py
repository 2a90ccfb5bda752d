"""The checkpoint error: what is wrong with which file, and what to do."""

from __future__ import annotations

import errno
from pathlib import Path

OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of the operating system that mean that no space is left."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read, or applied to this model."""


class NoSpaceError(CheckpointError):
    """A checkpoint for which there is no room."""


def explain(folder: Path, error: Exception) -> CheckpointError:
    """The error for people, from what went wrong while reading or writing in ``folder``."""
    if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
        return NoSpaceError(
            f"checkpoint in {folder}: no space left ({error.strerror}); the checkpoint before it is untouched. Free "
            "space or raise the quota, lower checkpoint.keep, or choose another train.output_dir"
        )
    if isinstance(error, OSError):
        return CheckpointError(f"checkpoint in {folder}: {error}; checkpoints written before are untouched")
    return CheckpointError(f"checkpoint in {folder}: {type(error).__name__}: {error}")
