"""Checks of ownership: no other user of the host can have changed what Weft executes or trusts."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)


def why_untrusted(path: Path) -> str:
    """Return why another user could have changed ``path``, or an empty string if only this user and root could.

    All folders above it are checked too, with links followed. A path that does not exist is as safe as the folders
    above it.
    """
    path = path.absolute()
    chain = dict.fromkeys((*reversed(path.parents), path, *reversed(path.resolve().parents), path.resolve()))
    for each in chain:
        try:
            found = os.lstat(each)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{each}: {error.strerror}"
        if found.st_uid not in (os.geteuid(), 0):
            return f"{each} belongs to user {found.st_uid}"
        if not stat.S_ISLNK(found.st_mode) and _others_write(found):
            return f"others can write to {each} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def own_folder(path: Path, setting: str) -> Path:
    """Create a folder that is private to this user, for files that are trusted later. It may exist already.

    Args:
        setting: the setting that names the folder. The error names it.

    Raises:
        ValueError: another user can change the folder's contents, or it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{setting}: {path} cannot be made ({error.strerror}); set another folder") from error
    if reason := why_untrusted(path):
        raise ValueError(f"{setting}: what is in {path} is not trusted: {reason}; make it yours alone, or set another")
    return path


def is_trusted(path: Path) -> bool:
    """True if no other user can have changed the file ``path``. Otherwise log the reason once."""
    if reason := why_untrusted(path):
        _warn(path, reason)
    return not reason


@cache
def _warn(path: Path, reason: str) -> None:
    log.warning("%s is not used, and made anew: %s", path, reason)


def _others_write(found: os.stat_result) -> bool:
    folder = stat.S_ISDIR(found.st_mode)
    if folder and found.st_mode & stat.S_ISVTX:
        return False  # no user can rename or remove another user's entry
    if found.st_mode & stat.S_IWOTH:
        return True
    # Folders are group-writable where each user has a group of their own (umask 002).
    return bool(found.st_mode & stat.S_IWGRP) and not (folder and _group_of_one(found.st_gid))


@cache
def _group_of_one(group: int) -> bool:
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
