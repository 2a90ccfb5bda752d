"""The simulation of what limits a run, in another process, so that no view waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from math import inf
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryFile
from threading import Lock
from time import monotonic
from typing import Any

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
        self._text, self._begun, self._due = b"null", 0.0, 0.0

    def newest(self) -> bytes:
        """Return the newest limits as JSON, null before the first. If they are old, new ones are computed meanwhile."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._output.seek(0)
                self._text = self._output.read() if self._process.returncode == 0 else b"[]"  # no step is recorded yet
                self._due = monotonic() + max(EXPLAIN_S, REST * (monotonic() - self._begun))
                self._process = None
            if self._process is None and monotonic() >= self._due:
                self._begun, self._output = monotonic(), TemporaryFile()  # noqa: SIM115 (until it has been read)
                self._process = subprocess.Popen(
                    self._command, stdout=self._output, stderr=DEVNULL, preexec_fn=partial(os.nice, 10)
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
