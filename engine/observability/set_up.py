"""Durations of the parts of a rank's set-up in an attempt, which make up a restart after a fault."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import monotonic, process_time, time

from weft.conf.host.private import append_private


class SetUpTimes:
    """Durations of the consecutive parts of a rank's set-up, in seconds of wall time and of processor time."""

    def __init__(self) -> None:
        """Begin the first attempt."""
        self.begin()

    def begin(self) -> None:
        """Begin an attempt, and drop the durations of the previous one."""
        self.parts: dict[str, tuple[float, float]] = {}
        self._at = monotonic(), process_time()

    def done(self, part: str) -> None:
        """Add the time since the end of the previous part, or since the beginning, to the duration of ``part``."""
        now = monotonic(), process_time()
        passed, computed = self.parts.get(part, (0.0, 0.0))
        self.parts[part] = passed + now[0] - self._at[0], computed + now[1] - self._at[1]
        self._at = now

    def write(self, path: Path, **more: object) -> None:
        """Append the durations as a line of JSON to a file that several ranks write. ``more`` are further fields."""
        parts = {part: [round(each, 4) for each in seconds] for part, seconds in self.parts.items()}
        append_private(path, json.dumps({"at": time(), "pid": os.getpid(), **more, "parts": parts}) + "\n")
