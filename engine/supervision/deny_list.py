"""The deny-list: hosts that runs must not use, with reason and time, until they are readmitted."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from weft.conf.host.private import write_private
from weft.conf.schema import WeftConfig

NAME = "denied_hosts.json"


@dataclass(frozen=True)
class Denial:
    """The reason for excluding a host.

    Attributes:
        reason: one line.
        at: seconds since 1970.
        by: who evicted it: "operator" or the name of a run.
    """

    reason: str
    at: float
    by: str


@dataclass(frozen=True)
class DenyList:
    """A JSON file, ``{"HOST": {"reason": ..., "at": ..., "by": ...}}``, that several runs and people may change.

    Attributes:
        path: the file, which need not exist.
    """

    path: Path

    @classmethod
    def of(cls, config: WeftConfig) -> DenyList:
        """Return the deny-list of a run: ``cluster.deny_list``, or a file in the folder of the runs' folders."""
        named = config.cluster.deny_list or Path(config.train.output_dir) / NAME
        return cls(Path(named).expanduser().absolute())

    def read(self) -> dict[str, Denial]:
        """Denials by host.

        Raises:
            ValueError: the file exists and cannot be read. An evicted host must not return because of that.
        """
        try:
            found = json.loads(self.path.read_text())
            return {host: _denial(entry) for host, entry in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self.path}: cannot be read as a deny-list ({error}); repair it, or remove it to admit every host"
            ) from error

    def evict(self, host: str, reason: str, by: str = "operator") -> None:
        """Add a host, or replace the reason of one that is listed."""
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
