"""The counters of a rank's links to other sites, published in shared memory next to its ring of events."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from weft.comm.links import SiteEndpoint
from weft.conf.host.files import write_atomic
from weft.conf.host.threads import Thread
from weft.engine.observability.event_ring import LINKS

EVERY_S = 1.0


class LinkGauge:
    """Writes the counters of all links of a rank each second, in a thread, until it is closed or the links are."""

    def __init__(self, folder: Path, rank: int, endpoint: SiteEndpoint) -> None:
        """Start the thread, which writes to ``folder``."""
        self._path, self._endpoint, self._closing = folder / f"{LINKS}{rank}", endpoint, threading.Event()
        self._thread = Thread(self._run, name="weft-links")
        self._thread.start()

    def _run(self) -> None:
        with suppress(RuntimeError, ValueError, OSError):  # closed links, or a removed folder
            self._publish()
            while not self._closing.wait(EVERY_S):
                self._publish()
            self._publish()

    def _publish(self) -> None:
        found = [{"peer": peer, **asdict(self._endpoint.counters(peer))} for peer in list(self._endpoint.peers)]
        write_atomic(self._path, json.dumps(found))

    def close(self) -> None:
        """Write the counters a last time if the links are open, and end the thread."""
        self._closing.set()
        self._thread.join()
