"""An agent's report of its host's ranks in every heartbeat. On the wire it is JSON with a list per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from weft.conf.host.processes import ProcessState
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.culprit import Place
from weft.engine.supervision.places import LinkReading, Reading

GONE = ""
"""State of a process that does not exist any more."""


class RankReport(NamedTuple):
    """The state of a rank, from its record and its process.

    Attributes:
        rank: global rank.
        attempt: that it was started for, or has joined since.
        phase: ``imports`` until it has written its first record.
        place: its progress in its row.
        num_microbatches: of its step.
        still_s: seconds since its last progress, or 0 before any.
        tick: of its background thread. Does not change while another thread holds the interpreter's lock.
        busy_s: seconds of its own computations, over `measured_steps`.
        measured_steps: steps of the attempt whose computations have been measured.
        state: the process's letter in /proc; `GONE` once it has ended.
        cpu_s: processor time that it has used.
        exit_code: negative for a signal, or None while it lives.
        resident_bytes: memory of the process.
        device_bytes: memory that it has allocated on its device.
        kept_step: of the attempt's newest memory checkpoint that is complete on all hosts, or 0 before the first.
        links: to ranks at other sites.
    """

    rank: int
    attempt: int
    phase: Phase = Phase.imports
    place: Place = Place(0)
    num_microbatches: int = 0
    still_s: float = 0.0
    tick: int = 0
    busy_s: float = 0.0
    measured_steps: int = 0
    state: str = "S"
    cpu_s: float = 0.0
    exit_code: int | None = None
    resident_bytes: int = 0
    device_bytes: int = 0
    kept_step: int = 0
    links: tuple[LinkReading, ...] = ()


def rank_report(
    rank: int,
    attempt: int,
    reading: Reading | None,
    process: ProcessState | None,
    *,
    now_ns: int,
    exit_code: int | None = None,
) -> RankReport:
    """Return the report of a rank.

    Args:
        attempt: that the agent has assigned it to.
        reading: its record on the page. A record of an earlier attempt is ignored.
        process: None if it has ended.
        now_ns: `time.monotonic_ns` of this host.
        exit_code: of the rank.
    """
    report = RankReport(rank, attempt, state=GONE, exit_code=exit_code)
    if process is not None:
        report = report._replace(
            state=process.state, cpu_s=round(process.cpu_s, 2), resident_bytes=process.resident_bytes
        )
    if reading is None or reading.attempt != attempt or reading.rank != rank:
        return report
    return report._replace(
        phase=reading.phase,
        place=reading.place,
        num_microbatches=reading.num_microbatches,
        still_s=round(max(0, now_ns - reading.moved_ns) / 1e9, 3),
        tick=reading.tick,
        busy_s=round(reading.busy_ns / 1e9, 6),
        measured_steps=reading.measured_steps,
        device_bytes=reading.device_bytes,
        kept_step=reading.kept_step,
        links=reading.links,
    )


class HostReport(msgspec.Struct, frozen=True):
    """A heartbeat of a host.

    Attributes:
        host: its name.
        ranks: a report for each of its ranks.
        vitals: of the host itself. See `weft.engine.supervision.vitals`.
    """

    host: str
    ranks: tuple[RankReport, ...]
    vitals: Mapping[str, Any] = {}


_PLACE, _LINKS = RankReport._fields.index("place"), RankReport._fields.index("links")


def check_lengths(report: Any) -> None:
    """Check the lengths of a `HostReport`'s lists in JSON, because msgspec fills missing fields with defaults.

    Raises:
        ValueError: the report is of another version of Weft.
    """
    try:
        whole = all(map(_is_whole, report["ranks"]))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"heartbeat: not of this form ({error!r}); driver and agents need the same Weft") from error
    if not whole:
        raise ValueError("heartbeat: a rank's report has another length; driver and agents need the same Weft")


def _is_whole(rank: Any) -> bool:
    return (
        len(rank) == len(RankReport._fields)
        and len(rank[_PLACE]) == len(Place._fields)
        and all(len(link) == len(LinkReading._fields) for link in rank[_LINKS])
    )
