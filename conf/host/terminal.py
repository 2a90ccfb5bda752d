"""Text for a terminal, of files and processes that are not trusted."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from weft.conf.host.private import without_credentials


def printable(value: Any) -> Any:
    """Return a text, or a tree of JSON types, with control characters escaped, because a terminal would obey them.

    Line feeds stay.
    """
    if isinstance(value, dict):
        return {printable(key): printable(below) for key, below in value.items()}
    if isinstance(value, list):
        return list(map(printable, value))
    if not isinstance(value, str):
        return value
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in value)


def print_error(command: str, error: Exception) -> None:
    """Print the lines of an error to standard error, each after the name of the command."""
    for line in printable(without_credentials(str(error))).splitlines():
        print(f"{command}: {line}", file=sys.stderr)


def print_notice(text: str) -> None:
    """Print a line to standard error if it can be written. A closed terminal or a log on a full disk stops no run."""
    with suppress(OSError):
        print(f"weft: {printable(without_credentials(text))}", file=sys.stderr, flush=True)
