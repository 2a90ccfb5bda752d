"""The simulation of what limits a run, in another process, so that no view waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from time import monotonic
from typing import IO, Any

from weft.conf.host.processes import give_way
from weft.tools.watch.views import EXPLAIN_S

REST = 5.0
"""Least time between two simulations, as a multiple of the last one's."""


class Limits:
    """The newest output of `weft explain --json` about a run."""

    def __init__(self, run_folder: Path) -> None:
        self._command = [sys.executable, "-m", "weft.tools.watch.explain", str(run_folder), "--json"]
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Any = None
        self._errors: Any = None
        self._text, self._begun, self._due = b"null", 0.0, 0.0

    def newest(self) -> bytes:
        """Return the newest limits as JSON, null before the first, or a text that says why there are none.

        If they are old, new ones are computed meanwhile.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._output.seek(0)
                failed = self._process.returncode != 0
                self._text = json.dumps(_last_line(self._errors)).encode() if failed else self._output.read()
                self._due = monotonic() + max(EXPLAIN_S, REST * (monotonic() - self._begun))
                self._process = None
            if self._process is None and monotonic() >= self._due:
                self._begun = monotonic()
                self._output, self._errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115 (until they have been read)
                self._process = subprocess.Popen(
                    self._command,
                    stdout=self._output,
                    stderr=self._errors,
                    start_new_session=True,
                    preexec_fn=partial(give_way, 10),
                )
            return self._text

    def close(self) -> None:
        """End the other process."""
        with self._lock:
            self._due = inf
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


def _last_line(errors: IO[bytes]) -> str:
    """Return the message with which the other process has ended, without the type of its exception."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines() or ["`weft explain` was killed"]
    return lines[-1].removeprefix("ValueError: ")
