"""Tests that problems of a checkpoint are reported by one kind of error, with a remedy."""

import errno
import os
from pathlib import Path

import pytest

from weft.engine.checkpoint.durable import CheckpointError, NoSpaceError, StorageError, explain
from weft.engine.checkpoint.ranks import Ranks


@pytest.mark.parametrize(
    ("error", "kind", "part"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), NoSpaceError, "no space left"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), NoSpaceError, "no space left"),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
            StorageError,
            "earlier checkpoints are unchanged",
        ),
        (RuntimeError("on purpose"), CheckpointError, "RuntimeError: on purpose"),
    ],
)
def test_every_error_names_the_folder_and_what_happened(error, kind, part):
    explained = explain(Path("/a/folder"), error)
    assert type(explained) is kind
    assert "/a/folder" in str(explained)
    assert part in str(explained)


@pytest.mark.parametrize("kind", [CheckpointError, NoSpaceError])
def test_what_is_explained_stays_as_it_is_on_every_rank(kind):
    error = kind("all of it")

    def fail() -> None:
        raise error

    with pytest.raises(CheckpointError, match=r"^all of it$") as raised:
        Ranks().together(Path("/a/folder"), fail)
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error
