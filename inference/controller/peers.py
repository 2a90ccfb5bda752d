"""Other controllers of the same workers: each publishes the work that it has placed, and counts that of the others."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from weft.conf.private import private_folder
from weft.inference.board.process_identity import own_identity, start_ticks

_NUMBERS = itertools.count()


class Peers:
    """The controllers that share a folder of boards; a file for each, which its process replaces in place."""

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
        self._others: dict[Path, dict[str, float]] = {}
        self.look()

    def publish(self, work_s: Mapping[str, float]) -> None:
        """Publish the seconds of work that this controller has placed on each worker, by URL."""
        text = json.dumps({"process": self._identity, "work_s": dict(work_s)}).encode()
        # One write, padded: a reader never finds the end of an older and longer text.
        os.pwrite(self._file, text.ljust(os.fstat(self._file).st_size), 0)

    def look(self) -> None:
        """Look for other controllers; removes the files of those that have ended."""
        found = set(self._folder.glob("controller-*.json")) - {self._path}
        self._others = {path: self._others.get(path, {}) for path in found}
        for path in found:
            process = self._read(path).get("process")
            if process and start_ticks(process[0]) != process[1]:
                path.unlink(missing_ok=True)
                del self._others[path]

    def work_s(self) -> Counter[str]:
        """Seconds of work that others have placed on each worker, by URL."""
        total: Counter[str] = Counter()
        for path in self._others:
            self._others[path] = self._read(path).get("work_s", self._others[path])
            total.update(self._others[path])
        return total

    def close(self) -> None:
        """Withdraw what was published."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _read(self, path: Path) -> dict:
        """The content of a file; empty while it is written."""
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(path.read_bytes())
            return value if isinstance(value, dict) else {}
        return {}
