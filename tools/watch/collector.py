"""The collector: writes the events of a host's ranks to Parquet files, in one process per host.

It runs at low priority outside of the ranks, and ends when all ranks of the host have ended. ``steps-*`` has a row per
step, rank and section (count, mean and maximum), ``spans-*`` a row per event, ``now-*.json`` the slots that run, and
``calls-*.json`` the collective calls of ranks that stall.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from time import monotonic, process_time, sleep, time
from typing import Any

import numpy as np

from weft.conf.host.documents import parse_json, read_text
from weft.conf.host.files import replacing, write_atomic
from weft.conf.host.processes import allow_files, give_way
from weft.engine.observability.event_ring import (
    KINDS,
    LINKS,
    PREFILL,
    PREFIX,
    RingReader,
    encode,
    epoch_s,
    event_text,
    rings_folder,
)
from weft.tools.watch import FOLDER
from weft.tools.watch.prefills import Prefills, stored
from weft.tools.watch.stalls import Stalls

POLL_S = 0.25
PUBLISH_S = 1.0
FLUSH_S = 2.0
REST = 10.0
"""Least time between two writes, as a multiple of the last one's processor time, which a busy host does not raise."""
MOST_UNWRITTEN = 500_000
"""Events after which files are written without that rest, so that memory is limited."""
TICK_S = 0.1
"""Age from which the time of a folder's last change tells of every change, because file systems count in ticks."""
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
        self._readers: dict[str, RingReader] = {}
        self._prefills = Prefills()
        self._examined_s = nan
        self._stalls = Stalls(run_folder, self._rings_folder, host)
        self._epoch_s = epoch_s()  # one for all rings: processes of a host share its monotonic clock
        self._waiting: list[np.ndarray] = []
        self._newest = np.zeros(0, "u8")  # step of each rank
        known = [int(path.stem.rpartition("-")[2]) for path in self._folder.glob(f"steps-{host}-*.parquet")]
        self._part = Part(max(known, default=0) + 1)
        self.last_steps: dict[int, tuple[int, float]] = {}
        self.links: dict[object, dict[str, Any]] = {}
        """The newest counters of links to other sites, by rank."""
        self.unwritten = 0
        """Events read since the last `flush`."""

    def poll(self) -> bool:
        """Read all rings. Return False if there are none, or all ranks' are closed and read to their end."""
        opened = self._opened()
        prefills = {name: opened.pop(name) for name in list(opened) if name.startswith(PREFILL)}
        if replaced := [self._readers[name] for name in opened if name in self._readers]:
            self._read(replaced)
            ranks = np.array([reader.rank for reader in replaced])
            self._complete(lambda events: np.isin(events["rank"], ranks))
            self._newest[ranks[ranks < len(self._newest)]] = 0  # a restarted rank may repeat steps
        self._readers |= opened
        is_open = any(not reader.is_closed for reader in self._readers.values())  # one open ring is enough
        self._read(self._readers.values())
        self._prefills.read(prefills)  # last, so that those of a step are there when its end is
        self._add(self._prefills.placed())
        return is_open

    def _add(self, events: np.ndarray) -> None:
        for name in ("start", "end"):
            events[name] += self._epoch_s
        self._waiting += [events] if len(events) else []
        self.unwritten += len(events)

    def _opened(self) -> dict[str, RingReader]:
        """Map the rings that are new, by file name."""
        found: dict[str, RingReader] = {}
        with suppress(FileNotFoundError):
            changed_s = os.stat(self._rings_folder).st_mtime
            if changed_s == self._examined_s:
                return found
            self._examined_s = changed_s if time() - changed_s > TICK_S else nan
            with os.scandir(self._rings_folder) as entries:
                for entry in entries:
                    known = self._readers.get(entry.name) or self._prefills.readers.get(entry.name)
                    if (known is None or known.inode != entry.inode()) and entry.name.startswith(("rank", PREFILL)):
                        try:
                            found[entry.name] = RingReader(Path(entry.path))
                        except (OSError, ValueError):  # it is being replaced
                            self._examined_s = nan
        return found

    @property
    def is_finished(self) -> bool:
        """True if all ranks have closed their rings at the end of the run."""
        return bool(self._readers) and all(reader.is_finished for reader in self._readers.values())

    def _read(self, readers: Iterable[RingReader]) -> None:
        events = stored(readers)
        if not len(events):
            return
        ended = events[events["first"] == STEP]
        self._prefills.steps_ended(ended)
        seconds = (ended["end"] - ended["start"]).tolist()
        self.last_steps.update(
            zip(ended["rank"].tolist(), zip(ended["step"].tolist(), seconds, strict=True), strict=True)
        )
        unknown = int(events["rank"].max()) + 1 - len(self._newest)
        self._newest = np.pad(self._newest, (0, max(0, unknown)))
        np.maximum.at(self._newest, events["rank"], events["step"])
        self._add(events)

    def _complete(self, is_complete: Callable[[np.ndarray], np.ndarray]) -> None:
        """Move the waiting events for which the argument is True to the current part."""
        batches, self._waiting = self._waiting, []
        for events in batches:
            is_done = is_complete(events)
            done, rest = (events, events[:0]) if is_done.all() else (events[is_done], events[~is_done])
            self._part.events += [done] if len(done) else []
            self._part.rows += len(done)
            self._waiting += [rest] if len(rest) else []

    def flush(self, *, everything: bool = False) -> None:
        """Write the current files, and begin others if they are large."""
        self.unwritten = 0
        self._complete(lambda events: (events["step"] + LATE_STEPS <= self._newest[events["rank"]]) | everything)
        part = self._part
        if not part.rows:
            return
        events = part.events[0] if len(part.events) == 1 else np.concatenate(part.events)
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
            seconds = [name for name in columns if name.endswith("_s")]
            parquet.write_table(
                pa.table(columns),
                draft,
                compression="zstd",
                use_dictionary=[name for name in columns if name not in seconds],
                column_encoding=dict.fromkeys(
                    seconds, "BYTE_STREAM_SPLIT"
                ),  # few values repeat, and most have alike bytes
            )

    def publish_current(self) -> None:
        """Write what each rank does now, and the calls of ranks that stall."""
        self.links = links = self._links()
        ranks = [reader.current() for reader in self._readers.values()]
        now = {"at": time(), "host": self._host, "ranks": [each | links.get(each["rank"], {}) for each in ranks]}
        write_atomic(self._folder / f"now-{self._host}.json", json.dumps(now))
        self._stalls.follow(ranks)

    def _links(self) -> dict[object, dict[str, Any]]:
        """Return the counters of links to other sites by rank (`LinkGauge`)."""
        found: dict[object, dict[str, Any]] = {}
        for path in self._rings_folder.glob(f"{LINKS}*"):
            with suppress(OSError, ValueError):  # it is being replaced
                if isinstance(links := parse_json(read_text(path)), list):
                    found[int(path.name.removeprefix(LINKS))] = {"links": links}
        return found

    def close(self) -> None:
        """Write everything, and remove the rings."""
        self.poll()  # a rank may have written and ended since the last time
        self._add(self._prefills.placed(everything=True))
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
    texts = {text: number for number, text in enumerate(dict.fromkeys(found))}
    places = np.array([texts[text] for text in found], "i4")
    section, stage = _sections(events["first"])
    return {
        "step": events["step"].astype("i4"),
        "rank": events["rank"].astype("i4"),
        "section": section,
        "stage": stage,
        "slot": pa.DictionaryArray.from_arrays(places[inverse.reshape(-1)], list(texts)),
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
    last_open = publish_at = flush_at = monotonic()
    was_open = False
    while True:
        polled, is_open = monotonic(), collector.poll()
        was_open = was_open or is_open
        if monotonic() > publish_at:
            publish_at = _after(collector.publish_current, PUBLISH_S)
        if monotonic() > flush_at or collector.unwritten > MOST_UNWRITTEN:
            flush_at = _after(collector.flush, FLUSH_S)
        yield
        if is_open:
            last_open = monotonic()  # however long this round took
        if collector.is_finished or polled - last_open > (END_S if was_open else START_S):
            return
        sleep(POLL_S)


def _after(write: Callable[[], None], least_s: float) -> float:
    """Write, and return the time from which to write again."""
    begun, used = monotonic(), process_time()
    write()
    return monotonic() + max(least_s, monotonic() - begun, REST * (process_time() - used))


def main(argv: Sequence[str]) -> int:
    """Run ``RUN_FOLDER PROMETHEUS_PORT`` until all ranks of this host have ended."""
    run_folder, port = Path(argv[0]), int(argv[1])
    give_way(10)
    allow_files()  # each mapped ring keeps one open
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
                exporter.update(collector.last_steps, collector.links)
    finally:
        collector.close()
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
