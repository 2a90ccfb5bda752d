"""Folders and files that no other user of the host can read, write or put something into."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from weft.conf.files import replacing

SECRETS = "WEFT_SECRETS"
"""Names a file of variables that ranks take into their environment, and no process list shows."""
_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def private_folder(path: Path) -> Path:
    """Make a folder of this user alone, and those above it that are missing; it may exist.

    In a folder that everybody may write to, such as /dev/shm, another user may have been there first.

    Raises:
        ValueError: it, or one on the way to it, is a stranger's or open to others.
    """
    path = path.absolute()
    for folder in (*reversed(path.parents), path):
        try:
            os.mkdir(folder, 0o700)
        except OSError as error:  # it is there; where not, looking at it says why it cannot be
            cannot = error
        try:
            found = os.lstat(folder)
        except FileNotFoundError:
            raise ValueError(f"{folder}: cannot be made ({cannot.strerror}); set another folder") from cannot
        mode = stat.S_IMODE(found.st_mode)
        if folder == path:
            safe = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not mode & 0o077
        else:  # a link says what its folder does; in a sticky one nobody can rename what is another's
            shared = mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not stat.S_ISLNK(found.st_mode)
            safe = found.st_uid in (os.geteuid(), 0) and not shared
        if not safe:
            raise ValueError(
                f"{folder}: not a folder of this user alone (owner {found.st_uid}, mode {mode:o}); chmod 700 it or "
                "remove it, or set inference.boards to another"
            )
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone can read, whole or not at all; a new folder of its own as well."""
    make_run_folder(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with replacing(path) as draft, open(os.open(draft, flags, 0o600), "w") as out:
        out.write(text)


def make_run_folder(path: Path) -> None:
    """Make a run's folder, where it is missing, for this user alone: whoever is to read in it gets it by chmod."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Variables that anybody may see in a process list, and those that go by the file of secrets."""
    secret = {name: value for name, value in variables.items() if any(word in name.upper() for word in _WORDS)}
    return {name: value for name, value in variables.items() if name not in secret}, secret


def take_secrets(environment: MutableMapping[str, str]) -> None:
    """Add the variables of the file that ``WEFT_SECRETS`` names, if any; those that are set stay.

    Raises:
        ValueError: it cannot be read, or others could have read or written it.
    """
    path = environment.get(SECRETS)
    if not path:
        return
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            found = os.fstat(file.fileno())
            lines = file.read().splitlines()
    except OSError as error:
        raise ValueError(
            f"{SECRETS}={path}: {error.strerror}; every host has to see the run's folder, or have WEFT_KEY set"
        ) from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(f"{SECRETS}={path}: others can read or write it; chmod 600, and change what was in it")
    for line in lines:
        name, _, value = line.partition("=")
        environment.setdefault(name, value)
