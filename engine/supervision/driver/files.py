"""Files of the driver: inputs, the journal from which it continues, and the deny-list that runs share."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from weft.conf.host.documents import parse_json, read_text
from weft.conf.host.private import CREDENTIALS, make_run_folder, write_private
from weft.conf.host.run_lock import RunLock
from weft.conf.host.storage import STORAGE_TIMEOUT_S
from weft.conf.host.terminal import print_notice
from weft.conf.schema import WeftConfig
from weft.conf.trees import to_yaml
from weft.engine.supervision.agent.forkserver import PRELOAD, TARGET


@dataclass(frozen=True)
class Spec:
    """The inputs of a driver other than the configuration.

    Attributes:
        target: the function that each rank runs, as ``module:function``.
        preload: modules that forkservers import.
        environment: variables for agents on other hosts, some of them secret.
        ssh_port: port of ssh. 0 means the default of ssh.
    """

    target: str
    preload: list[str]
    environment: dict[str, str]
    ssh_port: int = 0

    def write(self, run_folder: Path) -> None:
        """Write the specification into the run's folder, readable by its owner only."""
        write_private(spec_file(run_folder), json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_folder: Path) -> Spec:
        """Return the specification that `write` stored.

        Raises:
            ValueError: the file does not exist, or is another user's, who would choose what this user executes.
        """
        try:
            if (owner := spec_file(run_folder).stat().st_uid) not in (os.geteuid(), 0):
                raise ValueError(f"{run_folder}: the run belongs to user {owner}, who has to attach to it")
            return cls(**json.loads(spec_file(run_folder).read_text()))
        except OSError as error:
            raise ValueError(f"{run_folder}: no supervised run is under way there ({error.strerror})") from error


def spec_file(run_folder: Path) -> Path:
    """Return the specification's path. The file contains keys."""
    return run_folder / "supervisor" / "job.json"


def written_ns(path: Path) -> int:
    """Return when a file was last written, in nanoseconds, or 0 without a file."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def config_file(run_folder: Path) -> Path:
    """Return the path of the run's initial configuration. Each attempt has its own in the same folder."""
    return run_folder / "supervisor" / "config.yaml"


def prepare_folder(
    config: WeftConfig, folder: Path, environment: Mapping[str, str], *, supervised: bool = True
) -> None:
    """Write the configuration and the specification into the run's folder.

    Args:
        supervised: whether the run restarts after a fault, and continues when its launcher ends.

    Raises:
        ValueError: a restart would resume from another run's checkpoints.
    """
    checkpoints = folder / "checkpoints"
    if supervised and config.checkpoint.resume != "auto" and checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise ValueError(
            f"checkpoint.resume={config.checkpoint.resume}: after a fault the run would resume from {checkpoints}, "
            "which an earlier run has left; move it away, or choose another train.name"
        )
    RunLock.check(folder / "supervisor")
    settled = replace(config.supervise, enabled=supervised, in_process=supervised and config.supervise.in_process)
    write_private(config_file(folder), to_yaml(replace(config, supervise=settled)))
    write_private(folder / "config.yaml", to_yaml(config))
    stored = {name: value for name, value in environment.items() if name != CREDENTIALS}
    Spec(TARGET, list(PRELOAD), stored).write(folder)


JOURNAL = Path("supervisor", "journal.jsonl")
"""Path of the journal in a run's folder."""


class Journal:
    """Appends events durably. A disk that is full or hangs delays lines, but does not stop the run.

    Lines that a crash of the machine has damaged are skipped, because the others suffice for a driver to continue.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open ``path`` to append, and remove an incomplete last line, which a crash may have left.

        Raises:
            ValueError: too many lines are damaged.
            OSError: the file cannot be opened.
        """
        make_run_folder(path.parent)
        self.path = path
        damaged = list[str]()
        self.past: list[dict[str, Any]] = read_journal(path, damaged)
        if damaged and not {"launch", "attempt"} & {event["event"] for event in self.past}:
            raise ValueError(f"{path}: {damaged[0]}, and no launch or attempt is left; move the file away")
        if damaged:
            _set_aside(path, self.past, damaged[0])
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._size = _whole_bytes(path)
        os.ftruncate(self._file, self._size)
        self._waiting, self._is_late = b"", False
        self._thread = ThreadPoolExecutor(1, "journal")
        self._writing: Future[int] | None = None

    def record(self, event: str, **fields: Any) -> None:
        """Append an event with the time of day. On return it is on disk, or queued for a slow disk."""
        line = json.dumps({"at": round(self._clock(), 3), "event": event, **fields}) + "\n"
        self._waiting += line.encode()
        self.flush()

    def flush(self) -> None:
        """Write queued events. Wait for a write for at most `STORAGE_TIMEOUT_S`. While it hangs, do not wait again."""
        while self._waiting:
            if self._writing is None:
                self._writing = self._thread.submit(self._write, self._waiting, self._size)
                wait([self._writing], STORAGE_TIMEOUT_S)
            if not self._writing.done():
                return self._complain(f"nothing was written for {STORAGE_TIMEOUT_S:g} s")
            writing, self._writing = self._writing, None
            try:
                written = writing.result()
            except OSError as error:
                return self._complain(str(error.strerror))
            self._size += written
            self._waiting, self._is_late = self._waiting[written:], False

    def _write(self, data: bytes, at: int) -> int:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], at + written)
            os.fsync(self._file)
        except OSError:
            with suppress(OSError):  # such as a file system that has become read-only
                os.ftruncate(self._file, at)
            raise
        return written

    def _complain(self, problem: str) -> None:
        if not self._is_late:
            print_notice(f"{self.path}: {problem}; its next lines wait")
        self._is_late = True

    def close(self) -> None:
        """Write queued events without a timeout, and close the file."""
        if self._writing is not None:
            wait([self._writing])
        self.flush()
        self._thread.shutdown()
        os.close(self._file)


def read_journal(path: Path, damaged: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the events of a journal, oldest first; empty without a file. An incomplete last line is skipped.

    Args:
        damaged: receives descriptions of damaged lines before the last line. None makes such lines an error.

    Raises:
        ValueError: a line before the last is no JSON object, and ``damaged`` is None.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError("no event")
        except (ValueError, RecursionError) as error:
            if damaged is None:
                raise ValueError(f"{path}: line {number} is damaged ({error}); move the file away") from error
            damaged.append(f"line {number} is damaged ({error})")
            continue
        events.append(event)
    return events


def _set_aside(path: Path, events: list[dict[str, Any]], problem: str) -> None:
    """Replace a damaged journal by a journal of its valid lines, and store the damaged file under another name."""
    aside = path.with_suffix(".damaged")
    os.replace(path, aside)
    write_private(path, "".join(json.dumps(event) + "\n" for event in events))
    print_notice(f"{path}: {problem}; the driver goes on from the others, and it lies in {aside}")


def _whole_bytes(path: Path) -> int:
    """Return the length of the file up to its last complete line."""
    return path.read_bytes().rfind(b"\n") + 1


DENIED_HOSTS = "denied_hosts.json"


@dataclass(frozen=True)
class Denial:
    """The reason for excluding a host.

    Attributes:
        at: time of the eviction, in seconds since 1970.
        by: "operator", or the name of the run that evicted the host.
    """

    reason: str
    at: float
    by: str


@dataclass(frozen=True)
class DenyList:
    """A JSON file, ``{"HOST": {"reason": ..., "at": ..., "by": ...}}``, that several runs and people may change."""

    path: Path

    @classmethod
    def of(cls, named: str, output_dir: str) -> DenyList:
        """Return the deny-list of a run: ``cluster.deny_list``, or a file in the folder of the runs' folders."""
        named = named or os.path.join(output_dir, DENIED_HOSTS)
        return cls(Path(named).expanduser().absolute())

    def read(self) -> dict[str, Denial]:
        """Return the denials by host.

        Raises:
            ValueError: the file exists and cannot be read. Treating it as empty would readmit evicted hosts.
        """
        try:
            self.path.stat()
            found = parse_json(read_text(self.path))
            return {host: _denial(entry) for host, entry in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path}: cannot be read as a deny-list ({error}); repair it, or remove it to admit every host"
            ) from error

    def evict(self, host: str, reason: str, by: str = "operator") -> None:
        """Add a host, or replace the reason of a listed host."""
        with self._locked() as hosts:
            hosts[host] = Denial(" ".join(reason.split()), time.time(), by)

    def readmit(self, host: str) -> bool:
        """Remove a host, and return whether it was listed."""
        with self._locked() as hosts:
            return hosts.pop(host, None) is not None

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Denial]]:
        """Yield the entries for modification, under a lock of the file."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            hosts = self.read()
            yield hosts
            write_private(self.path, json.dumps({name: asdict(entry) for name, entry in hosts.items()}, indent=1))
        finally:
            os.close(lock)


def _denial(entry: Mapping[str, object]) -> Denial:
    reason, at, by = (entry.get(field.name) for field in fields(Denial))
    if not (isinstance(reason, str) and isinstance(at, (int, float)) and isinstance(by, str)):
        raise ValueError(f"an entry holds reason, at and by, not {dict(entry)}")
    return Denial(reason, float(at), by)
