"""Folders and files that are private to this user, and a run's folder."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import Any

from weft.conf.host.files import replacing

SECRETS = "WEFT_SECRETS"
"""Environment variable with the path of a file of secret variables, which keeps them out of process lists."""
_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
CREDENTIALS = "WEFT_URL_CREDENTIALS"
"""Environment variable with the URLs of data that have credentials, as JSON: each by its form without them."""
HIDDEN = "***"
"""Replaces the credentials of a URL in what is shown or stored."""
_USER = re.compile(r"(?<!\bgithub)(?<!\bgit)://(?:[^\s/?#@'\"]+|[^\s/?#@:'\"]*:(?!\d+/)[^\s?#@'\"]*)@")
"""User and password in a URL. The password may have slashes that should have been escaped; a port has digits only."""
_PARAMETER = re.compile(
    r"([?&;#][\w.-]*(?:token|sig|secret|key|passw|pwd|credential|auth)[\w.-]*=)[^&#\s'\"]*[^&#\s'\":;,.)]",
    re.IGNORECASE,
)
"""A parameter of a URL whose name is one of a credential, such as the signature of a presigned URL."""


def private_folder(path: Path) -> Path:
    """Create a folder that only this user can access, with its missing parents. It may exist already.

    In a world-writable folder such as /dev/shm, another user may have created it first.

    Raises:
        ValueError: the folder is not private to this user, or another user could replace one of its parents.
    """
    path = path.absolute()
    for folder in (*reversed(path.parents), path):
        try:
            os.mkdir(folder, 0o700)
        except OSError as error:  # it exists; otherwise the stat below raises the reason
            cannot = error
        try:
            found = os.lstat(folder)
        except FileNotFoundError:
            raise ValueError(f"{folder}: cannot be made ({cannot.strerror}); set another folder") from cannot
        mode = stat.S_IMODE(found.st_mode)
        if folder == path:
            safe = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not mode & 0o077
        else:  # a link is as safe as its folder; in a sticky folder no user can rename another's entry
            shared = mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not stat.S_ISLNK(found.st_mode)
            safe = found.st_uid in (os.geteuid(), 0) and not shared
        if not safe:
            raise ValueError(
                f"{folder}: not a folder of this user alone (owner {found.st_uid}, mode {mode:o}); chmod 700 it or "
                "remove it, or set inference.boards to another"
            )
    return path


def shared_memory_folder(user: int, *, within: Path = Path("/dev/shm")) -> Path:
    """Return the folder of ``user`` in shared memory. All processes of this user on the host get the same one.

    Its name is ``weft-UID``, and it need not exist. If another user has created a folder with this name, it is the
    oldest folder of this user whose name begins with ``weft-UID-``. It is created if it is missing.
    """
    usual = within / f"weft-{user}"
    if user != os.geteuid() or not os.path.lexists(usual) or _is_own_folder(usual):
        return usual
    while True:
        others = sorted(path for path in within.glob(f"{usual.name}-*") if _is_own_folder(path))
        if others:
            return others[0]
        with suppress(FileExistsError):
            os.mkdir(f"{usual}-{time_ns():020d}", 0o700)


def _is_own_folder(path: Path) -> bool:
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def write_private(path: Path, text: str) -> None:
    """Atomically write a file that only its owner can read. If its folder is new, it is private too."""
    make_run_folder(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with replacing(path) as draft, open(os.open(draft, flags, 0o600), "w") as out:
        out.write(text)


def shared_key(path: Path) -> str:
    """Return the secret in a file that only this user can read. The first process that calls this creates it."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        return path.read_text()
    write_private(draft, secrets.token_hex(32))
    with suppress(FileExistsError):  # another process was faster
        os.link(draft, path)
    draft.unlink()
    return path.read_text()


def append_private(path: Path, text: str) -> None:
    """Append to a file that only its owner can read, in one write. The file is created if it is missing."""
    make_run_folder(path.parent)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "a") as out:
        out.write(text)


def make_run_folder(path: Path) -> None:
    """Create a run's folder if it is missing. It is private to this user, who can use chmod to let others read it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_shared_folder(path: Path) -> None:
    """Create a run's folder, or change an existing one, so that users may read it as the umask allows."""
    path.mkdir(parents=True, exist_ok=True)
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o777 & ~mask)


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split variables into those that may appear in a process list, and secret ones."""
    secret = {name: value for name, value in variables.items() if any(word in name.upper() for word in _WORDS)}
    return {name: value for name, value in variables.items() if name not in secret}, secret


def without_credentials(value: Any) -> Any:
    """Return a text, or a tree of JSON types, with the credentials in its URLs replaced by `HIDDEN`."""
    if isinstance(value, dict):
        return {key: without_credentials(below) for key, below in value.items()}
    if isinstance(value, list):
        return list(map(without_credentials, value))
    if not isinstance(value, str):
        return value
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(f"://{HIDDEN}@", value))


def credentials_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable `CREDENTIALS` of an environment, if it is set. It is stored in no file of a run."""
    return {CREDENTIALS: environment[CREDENTIALS]} if CREDENTIALS in environment else {}


def take_secrets(environment: MutableMapping[str, str]) -> None:
    """Set the variables in the file that ``WEFT_SECRETS`` names, if any. Variables that are set already stay unchanged.

    Raises:
        ValueError: the file cannot be read, or other users can read or write it.
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
