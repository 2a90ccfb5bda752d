"""The collector: writes the events of a host's ranks to Parquet files, in one process per host.

It runs at low priority outside of the ranks, and ends when all ranks of the host have ended. ``steps-*`` has a row per
step, rank and section (count, mean and maximum), ``spans-*`` a row per event, and ``now-*.json`` the slots that run.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import numpy as np

from weft.conf.host.files import replacing, write_atomic
from weft.engine.observability.event_ring import DTYPE, KINDS, PREFIX, RingReader, encode, event_text, rings_folder
from weft.tools.watch import FOLDER

POLL_S = 0.25
PUBLISH_S = 1.0
FLUSH_S = 2.0
REST = 10.0
"""Least time between two writes, as a multiple of the last one's."""
START_S = 60.0
"""Seconds that the collector waits for the first ring."""
END_S = 3.0
"""Seconds after the end of the last rank at which the collector ends, unless a restarted rank has a new ring."""
OLD_S = 1800.0
"""Age in seconds from which rings without a collector are removed."""
PART_ROWS = 100_000
"""Events after which another pair of files begins."""
SPAN_PARTS = 64
"""Files of spans that are kept: the first, and the newest."""
LATE_STEPS = 2
"""Steps for which the events of a step may still arrive from the device."""
STEP = encode("step")
STORED = np.dtype([("rank", "i4"), *DTYPE.descr])


@dataclass
class Part:
    """The events of consecutive steps, which one pair of files holds."""

    number: int
    events: list[np.ndarray] = field(default_factory=list)
    rows: int = 0


class Collector:
    """Reads the rings of one host's ranks."""

    def __init__(self, run_folder: Path, host: str) -> None:
        """Write to a run's folder, after the files of earlier collectors of this host."""
        self._folder, self._host = run_folder / FOLDER, host
        self._rings_folder = rings_folder(run_folder)
        self._readers: dict[Path, tuple[int, RingReader]] = {}
        self._waiting: dict[int, list[np.ndarray]] = {}
        known = [int(path.stem.rpartition("-")[2]) for path in self._folder.glob(f"steps-{host}-*.parquet")]
        self._part = Part(max(known, default=0) + 1)
        self.last_steps: dict[int, tuple[int, float]] = {}

    def poll(self) -> bool:
        """Read all rings. Return False if there are none, or all are closed and read to their end."""
        is_open = False
        for path in self._rings_folder.glob("rank*"):
            with suppress(OSError, ValueError):  # it is being replaced
                inode = path.stat().st_ino
                if path not in self._readers or self._readers[path][0] != inode:
                    self._drain(path)
                    self._readers[path] = inode, RingReader(path)
        for path in list(self._readers):
            is_open = is_open or not self._readers[path][1].is_closed  # one open ring is enough
            self._read(path)
        return is_open

    @property
    def is_finished(self) -> bool:
        """True if all ranks have closed their rings at the end of the run."""
        return bool(self._readers) and all(reader.is_finished for _, reader in self._readers.values())

    def _drain(self, path: Path) -> None:
        if path in self._readers:
            self._read(path)
            self._complete(self._readers[path][1].rank, everything=True)

    def _read(self, path: Path) -> None:
        reader = self._readers[path][1]
        found = reader.read()
        if not len(found):
            return
        events = np.empty(len(found), STORED)
        events["rank"] = reader.rank
        for name in DTYPE.names or ():
            events[name] = found[name]
        for name in ("start", "end"):
            events[name] += reader.wall_s
        self._waiting.setdefault(reader.rank, []).append(events)
        ended = found[found["first"] == STEP]
        if len(ended):
            self.last_steps[reader.rank] = int(ended[-1]["step"]), float(ended[-1]["end"] - ended[-1]["start"])

    def _complete(self, rank: int, *, everything: bool = False) -> None:
        """Move a rank's events of complete steps to the current part."""
        events = np.concatenate(self._waiting.pop(rank, []) or [np.empty(0, STORED)])
        if not len(events):
            return
        is_done = np.full(len(events), True) if everything else events["step"] + LATE_STEPS <= events["step"].max()
        if not is_done.all():
            self._waiting[rank] = [events[~is_done]]
        self._part.events.append(events[is_done])
        self._part.rows += int(is_done.sum())

    def flush(self, *, everything: bool = False) -> None:
        """Write the current files, and begin others if they are large."""
        for rank in list(self._waiting):
            self._complete(rank, everything=everything)
        part = self._part
        if not part.rows:
            return
        events = np.concatenate(part.events)
        part.events = [events]
        self._write("steps", summaries(events))
        self._write("spans", spans(events))
        if part.rows >= PART_ROWS:
            self._part = Part(part.number + 1)
            for path in self._span_files()[1 : -SPAN_PARTS + 1]:
                path.unlink(missing_ok=True)

    def _span_files(self) -> list[Path]:
        return sorted(self._folder.glob(f"spans-{self._host}-*.parquet"))

    def _write(self, kind: str, columns: dict[str, Any]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        with replacing(self._folder / f"{kind}-{self._host}-{self._part.number:05d}.parquet") as draft:
            parquet.write_table(pa.table(columns), draft, compression="zstd")

    def publish_current(self) -> None:
        """Write what each rank does now."""
        now = {"at": time(), "host": self._host, "ranks": [reader.current() for _, reader in self._readers.values()]}
        write_atomic(self._folder / f"now-{self._host}.json", json.dumps(now))

    def close(self) -> None:
        """Write everything, and remove the rings."""
        self.flush(everything=True)
        self.publish_current()
        shutil.rmtree(self._rings_folder, ignore_errors=True)


def _sections(words: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return kinds as a dictionary column, and virtual stages, of events with these first words."""
    import pyarrow as pa

    names = [*KINDS, "unknown"]
    numbers = np.minimum((words & 0xFF).astype("i4") - 1, len(KINDS))
    numbers[numbers < 0] = len(KINDS)
    return pa.DictionaryArray.from_arrays(numbers, names), (words >> 8 & 0xFFFFFF).astype("i4") - 1


def summaries(events: np.ndarray) -> dict[str, Any]:
    """Return count, mean and maximum of the seconds of each step, rank and section as columns."""
    sections = events["first"] & 0xFFFFFFFF  # without the micro-batch
    seconds = events["end"] - events["start"]
    order = np.lexsort((sections, events["rank"], events["step"]))
    keys = np.stack([events["step"][order], events["rank"][order].astype("u8"), sections[order]])
    first = np.flatnonzero(np.r_[True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)])
    counts = np.diff(np.r_[first, len(order)])
    section, stage = _sections(keys[2][first])
    return {
        "step": keys[0][first].astype("i4"),
        "rank": keys[1][first].astype("i4"),
        "section": section,
        "stage": stage,
        "count": counts.astype("i4"),
        "mean_s": np.add.reduceat(seconds[order], first) / counts,
        "max_s": np.maximum.reduceat(seconds[order], first),
    }


def spans(events: np.ndarray) -> dict[str, Any]:
    """Return every event as columns."""
    import pyarrow as pa

    (firsts, first), (seconds, second) = (np.unique(events[name], return_inverse=True) for name in ("first", "second"))
    pairs, inverse = np.unique(first * len(seconds) + second, return_inverse=True)
    found = [event_text(int(firsts[pair // len(seconds)]), int(seconds[pair % len(seconds)])) for pair in pairs]
    texts = list(dict.fromkeys(found))
    places = np.array([texts.index(text) for text in found], "i4")
    section, stage = _sections(events["first"])
    return {
        "step": events["step"].astype("i4"),
        "rank": events["rank"],
        "section": section,
        "stage": stage,
        "slot": pa.DictionaryArray.from_arrays(places[inverse.reshape(-1)], texts),
        "start_s": events["start"],
        "end_s": events["end"],
    }


def _lock(folder: Path) -> int | None:
    """Return the lock of the host's collector, or None if an earlier one keeps it."""
    file = os.open(folder / f"lock-{_host()}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    until = monotonic() + 2 * END_S
    while monotonic() < until:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        sleep(POLL_S)
    return None


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname())


def _remove_stale(own: Path) -> None:
    for folder in own.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if (
                folder != own
                and time() - folder.stat().st_mtime > OLD_S
                and all(RingReader(ring).is_closed for ring in folder.glob("rank*"))
            ):
                shutil.rmtree(folder)


def rounds(collector: Collector) -> Iterator[None]:
    """Poll and flush until all ranks have ended, and yield after each round."""
    last_open = published = due = monotonic()
    was_open = False
    while True:
        polled, is_open = monotonic(), collector.poll()
        was_open = was_open or is_open
        if monotonic() - published > PUBLISH_S:
            collector.publish_current()
            published = monotonic()
        if published > due:
            collector.flush()
            due = monotonic() + max(FLUSH_S, REST * (monotonic() - published))
        yield
        if is_open:
            last_open = monotonic()  # however long this round took
        if collector.is_finished or polled - last_open > (END_S if was_open else START_S):
            return
        sleep(POLL_S)


def main(argv: Sequence[str]) -> int:
    """Run ``RUN_FOLDER PROMETHEUS_PORT`` until all ranks of this host have ended."""
    run_folder, port = Path(argv[0]), int(argv[1])
    os.nice(10)
    lock = _lock(run_folder / FOLDER)
    if lock is None:
        return 0
    _remove_stale(rings_folder(run_folder))
    collector = Collector(run_folder, _host())
    exporter = None
    if port:
        from weft.tools.watch.prometheus import Exporter

        exporter = Exporter(run_folder, port)
    try:
        for _ in rounds(collector):
            if exporter is not None:
                exporter.update(collector.last_steps)
    finally:
        collector.close()
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
