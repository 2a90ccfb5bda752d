"""Other controllers of the same workers: each publishes its placed work and what its clients use, and reads theirs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from weft.conf.host.private import private_folder
from weft.conf.host.processes import own_identity, start_ticks

SILENT_S = 10.0
"""Age of a publication from which it is not counted: its controller is stopped, and its prompts are done or late."""
_NUMBERS = itertools.count()


class PlacedWork(NamedTuple):
    """Seconds of work that controllers have placed on a worker."""

    left_s: float
    done_s: float
    """Seconds of all prompts that were answered so far."""


NONE = PlacedWork(0.0, 0.0)


class Usage(NamedTuple):
    """A client's use of controllers: requests and prompt tokens so far, and requests in progress."""

    requests: float = 0.0
    tokens: float = 0.0
    running: float = 0.0

    def plus(self, *more: float) -> Usage:
        """Return the sum of this and ``more``, in the order of the fields."""
        return Usage(*map(sum, zip(self, more, strict=True)))


class Peers:
    """The controllers that share a folder of boards. Each has a file, which its process replaces in place."""

    def __init__(self, folder: Path) -> None:
        """Publish in ``folder``, which is created if necessary.

        Raises:
            OSError: it cannot be written.
            ValueError: it is not private to this user.
        """
        self._folder = private_folder(folder)
        self._identity = own_identity()
        self._path = self._folder / f"controller-{self._identity[0]}-{next(_NUMBERS)}.json"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._own: dict[str, Mapping] = {}
        self._others: dict[Path, dict] = {}
        self.refresh()

    def publish(self, work: Mapping[str, PlacedWork]) -> None:
        """Publish the work that this controller has placed on each worker."""
        self._write(work=work)

    def publish_usage(self, usage: Mapping[str, Usage]) -> None:
        """Publish what each client has used of this controller."""
        self._write(usage=usage)

    def _write(self, **parts: Mapping) -> None:
        if self._file < 0:
            return
        self._own.update(parts)
        text = json.dumps({"process": self._identity, "at_s": monotonic(), **self._own}).encode()
        # One padded write, so that a reader never finds the end of an older and longer text.
        os.pwrite(self._file, text.ljust(os.fstat(self._file).st_size), 0)

    def refresh(self) -> None:
        """Look for other controllers, and remove the files of those that have ended."""
        found = set(self._folder.glob("controller-*.json")) - {self._path}
        self._others = {path: self._others.get(path, {}) for path in found}
        for path in found:
            process = self._read(path).get("process")
            if process and start_ticks(process[0]) != process[1]:
                path.unlink(missing_ok=True)
                del self._others[path]

    def work(self) -> dict[str, PlacedWork]:
        """Return the work that other controllers have placed on each worker."""
        total: dict[str, PlacedWork] = {}
        for published, is_silent in self._published():
            for worker, (left_s, done_s) in published.get("work", {}).items():
                before = total.get(worker, NONE)
                total[worker] = PlacedWork(before.left_s + (0.0 if is_silent else left_s), before.done_s + done_s)
        return total

    def usage(self) -> dict[str, Usage]:
        """Return what each client has used of other controllers."""
        total: dict[str, Usage] = {}
        for published, is_silent in self._published():
            for name, (requests, tokens, running) in published.get("usage", {}).items():
                total[name] = total.get(name, Usage()).plus(requests, tokens, 0.0 if is_silent else running)
        return total

    def _published(self) -> Iterator[tuple[dict, bool]]:
        """Yield what other controllers have published, and True if it is too old."""
        for path in self._others:
            self._others[path] = published = self._read(path) or self._others[path]
            yield published, monotonic() - published.get("at_s", 0.0) > SILENT_S

    def close(self) -> None:
        """Withdraw what is published."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1

    def _read(self, path: Path) -> dict:
        """Return the content of a file. It is empty while the file is being written."""
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(path.read_bytes())
            return value if isinstance(value, dict) else {}
        return {}
