"""Exclusion of hosts: the deny-list, and the examination of hosts on which ranks keep failing."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from weft.comm.authenticated_socket import Address
from weft.conf.host.diagnosis import DOCTOR, doctor_arguments, failures, read_findings
from weft.conf.host.private import write_private
from weft.conf.schema import WeftConfig
from weft.engine.supervision.messages import FaultKind
from weft.engine.supervision.ranks import Ranks

NAME = "denied_hosts.json"


@dataclass(frozen=True)
class Denial:
    """The reason for excluding a host.

    Attributes:
        reason: one line.
        at: time of the eviction, in seconds since 1970.
        by: "operator", or the name of the run that evicted the host.
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
        """Return the denials by host.

        Raises:
            ValueError: the file exists and cannot be read. Treating it as empty would readmit evicted hosts.
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


SUSPICIOUS = 2
"""Number of faults of a host after which it is examined. The count starts again then."""
DOCTOR_S = 60.0
"""Timeout of an examination in seconds. A host that exceeds it has failed."""
_OF_OTHERS = (FaultKind.lost_peer.value, FaultKind.disk_full.value, FaultKind.checkpoint.value)
"""Faults that do not count, because the host is not the cause or the cause is known."""


class Suspicions:
    """Counts the faults of each host."""

    def __init__(self) -> None:
        """Start without faults."""
        self._faults: Counter[str] = Counter()

    def saw_fault(self, kind: str, culprit: Mapping[str, Any]) -> None:
        """Count a fault for the hosts of its culprit."""
        if kind not in _OF_OTHERS:
            self._faults.update([culprit["host"]] if "host" in culprit else culprit.get("hosts", ()))

    def take(self) -> str | None:
        """Return a host to examine and reset its count, or None if there is none."""
        host = next((host for host, count in self._faults.items() if count >= SUSPICIOUS), None)
        if host is not None:
            del self._faults[host]
        return host


async def examine(ranks: Ranks, run_folder: Path, slots: int, driver: Address) -> list[str]:
    """Run `weft doctor node` on this host, and return its failed checks, one line each.

    Args:
        ranks: the host's ranks. Their forkserver has already imported the modules that a doctor needs.
        slots: number of ranks of this host.
    """
    where = "" if isinstance(driver, str) else "{}:{}".format(*driver)  # a driver on this machine uses the same clock
    arguments = doctor_arguments(run_folder, ranks=slots, driver=where)
    printed, code = await ranks.ask("doctor", DOCTOR, arguments, DOCTOR_S)
    return [f"{finding.check}: {finding.says}" for finding in failures(read_findings(printed, code))]


def reason_to_evict(failed: Sequence[str]) -> str:
    """Return the reason to evict a host, from its failed checks."""
    return f"weft doctor node: {'; '.join(failed)}"
