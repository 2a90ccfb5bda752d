"""Messages between driver, agents and ranks, and their only encoding: JSON by msgspec."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from weft.conf.host.processes import ProcessState
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.culprit import RowProgress
from weft.engine.supervision.faults import RankEnd
from weft.engine.supervision.progress_page import LinkReading, Reading


@dataclass(frozen=True)
class AgentCommand:
    """The command that an agent receives when it starts, as one line of JSON on its standard input.

    Attributes:
        host: name of its host.
        generation: number of this agent. The driver accepts one agent of a host.
        address: the driver's.
        run_folder: of the run.
        slots: most ranks of this host.
        preload: modules for the forkserver.
        environment: variables to set, some of them secret.
        heartbeat_s: seconds between reports.
        orphan_s: seconds without a driver after which it ends its ranks and itself.
        stop_s: seconds in which ranks must end after a signal to this agent.
        launch: number of this start of the run. Memory checkpoints of earlier starts are removed.
        parent: process with which this agent and its ranks end, or 0 if the run outlives it.
        driver: command that starts the driver again, or empty if another agent does.
        yields_s: seconds that another agent of this host, which has done its imports, has to reconnect first if it
            is alive, or 0 if there is no other.
    """

    host: str
    generation: int
    address: str | tuple[str, int]
    run_folder: str
    slots: int
    preload: list[str]
    environment: dict[str, str]
    heartbeat_s: float
    orphan_s: float
    stop_s: float = 300.0
    launch: int = 0
    parent: int = 0
    driver: list[str] = field(default_factory=list)
    yields_s: float = 0.0

    @classmethod
    def read(cls, line: str) -> AgentCommand:
        """Parse a command from a line of JSON."""
        fields = json.loads(line)
        if not isinstance(fields["address"], str):
            fields["address"] = tuple(fields["address"])
        return cls(**fields)

    @property
    def peer(self) -> str:
        """Return the name that the driver uses for this agent."""
        return f"{self.host}#{self.generation}"


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
    place: RowProgress = RowProgress(0)
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
        and len(rank[_PLACE]) == len(RowProgress._fields)
        and all(len(link) == len(LinkReading._fields) for link in rank[_LINKS])
    )


class AgentMessage(msgspec.Struct, frozen=True):
    """The state of a host, reported by its agent.

    Attributes:
        attempt: whose ranks it has, or 0 before the first.
        ready: whether ranks can start at once, because the imports are done.
        report: the ranks' progress.
        ends: failures, by rank.
        lines: last output of ranks that have failed.
        examined: the attempt after which the host was last examined, or 0 before the first examination.
        failed: the checks that failed then.
        leaving: whether the agent has received a signal to end, because its host shuts down.
    """

    attempt: int
    ready: bool
    report: HostReport
    ends: Mapping[int, RankEnd]
    parked: Mapping[int, str]
    """Ranks on standby, with the reason for which they left the attempt."""
    lines: Mapping[int, list[str]]
    examined: int
    failed: Sequence[str]
    leaving: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return the message as JSON values."""
        return msgspec.to_builtins(self, str_keys=True)

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> AgentMessage:
        """Return the message that `to_wire` converted, after JSON.

        Raises:
            ValueError: it has another form.
        """
        check_lengths(message.get("report"))
        try:
            return msgspec.convert(message, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"a report: {error}; driver and agents need the same Weft") from error
