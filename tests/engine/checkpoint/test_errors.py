"""What went wrong with a checkpoint is said in one kind of error, with what people can do."""

import errno
import os
from pathlib import Path

import pytest

from weft.engine.checkpoint.errors import CheckpointError, explain


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "no space left"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "no space left"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "checkpoints written before are untouched"),
        (RuntimeError("on purpose"), "RuntimeError: on purpose"),
    ],
)
def test_every_error_names_the_folder_and_what_happened(error, part):
    explained = explain(Path("/a/folder"), error)
    assert type(explained) is CheckpointError
    assert "/a/folder" in str(explained)
    assert part in str(explained)


def test_what_is_explained_stays_as_it_is():
    error = CheckpointError("all of it")
    assert explain(Path("/a/folder"), error) is error
