"""Stalls of a host's ranks: their recorded calls are stored in the run's folder, so that they outlive the ranks."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from time import time

from weft.conf.host.files import write_atomic
from weft.engine.observability.event_ring import RingReader
from weft.tools.watch import FOLDER
from weft.tools.watch.calls import read_ranks

STALL_S = 2.0
"""Seconds that a rank runs the same slot after which calls are stored, below the least deadline of the supervisor. They
are stored again when the time has doubled, because a slot may rightly last long."""


class Stalls:
    """Watches the slots of one host's ranks."""

    def __init__(self, run_folder: Path, rings: Path, host: str) -> None:
        self._path, self._rings = run_folder / FOLDER / f"calls-{host}.json", rings
        self._due_s = STALL_S

    def follow(self, readers: Collection[RingReader]) -> None:
        """Store the calls of all ranks of this host, if one has run its slot for long."""
        current = {reader.rank: reader.current() for reader in readers if not reader.is_closed}
        stalled_s = max((time() - float(str(now["since"])) for now in current.values() if now["slot"]), default=0.0)
        if stalled_s < STALL_S:
            self._due_s = STALL_S
        elif stalled_s > self._due_s:
            self._due_s = 2 * stalled_s
            found = read_ranks(self._rings, sorted(current))
            ranks = {rank: {**dump, "now": current[rank]} for rank, dump in found.items() if isinstance(dump, dict)}
            if ranks:
                now_s = time()
                write_atomic(self._path, json.dumps({"at": now_s, "still": now_s - stalled_s, "ranks": ranks}))
