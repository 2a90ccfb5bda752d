"""Stalls of a host's ranks: their recorded calls are stored in the run's folder, so that they outlive the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import sleep, time
from typing import Any

from weft.conf.host.files import write_atomic
from weft.conf.host.threads import Thread
from weft.tools.watch import FOLDER
from weft.tools.watch.calls import read_ranks

STALL_S = 2.0
"""Seconds that a rank runs the same slot after which calls are stored, below the least deadline of the supervisor. They
are stored again when the time has doubled, because a slot may rightly last long."""
REST = 10.0
"""Least time from one reading of the calls to the next, as a multiple of its duration."""


class Stalls:
    """Watches the slots of one host's ranks."""

    def __init__(self, run_folder: Path, rings: Path, host: str) -> None:
        self._path, self._rings = run_folder / FOLDER / f"calls-{host}.json", rings
        self._due_s = STALL_S
        self._thread: Thread | None = None

    def follow(self, ranks: Iterable[Mapping[str, Any]]) -> None:
        """Store the calls of all ranks of this host, if one has run its slot for long. It takes place in a thread.

        Args:
            ranks: what each does. See `RingReader.current`.
        """
        current = {each["rank"]: each for each in ranks if each["alive"]}
        stalled_s = max((time() - now["since"] for now in current.values() if now["slot"]), default=0.0)
        if stalled_s < STALL_S:
            self._due_s = STALL_S
        elif stalled_s > self._due_s and not (self._thread and self._thread.is_alive()):
            self._due_s = 2 * stalled_s
            self._thread = Thread(self._store, current, stalled_s, name="weft-stalls")
            self._thread.start()

    def _store(self, current: Mapping[int, Mapping[str, Any]], stalled_s: float) -> None:
        begun_s = time()
        found = read_ranks(self._rings, sorted(current))  # slow, if ranks of a busy host answer
        ranks = {rank: {**dump, "now": current[rank]} for rank, dump in found.items() if isinstance(dump, dict)}
        if ranks:
            write_atomic(self._path, json.dumps({"at": time(), "still": begun_s - stalled_s, "ranks": ranks}))
        sleep(REST * (time() - begun_s))
