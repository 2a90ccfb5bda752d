"""Messages between driver, agents, forkservers and ranks, and their one encoding in JSON.

Driver and agents exchange them over TLS (`weft.engine.supervision.control`), agents, forkservers and ranks over Unix
sockets. A rank's progress lies in shared memory (`weft.engine.supervision.progress_page`). No torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import msgspec

from weft.engine.observability.watcher import Phase

T = TypeVar("T")
MOST_BYTES = 1 << 17
"""Largest size of a message of a forkserver or a rank, which is one packet of a Unix socket."""

# Environment variables of a rank

AGENT = "WEFT_AGENT"
"""Path of the socket of the rank's agent."""
MEMORY = "WEFT_MEMORY"
"""Folder of memory checkpoints, which the agent creates, and removes at the end of the run."""
ATTEMPT = "WEFT_ATTEMPT"
"""Number of the attempt, from 0."""


def to_fields(message: Any) -> Any:
    """Return a message as JSON values."""
    return msgspec.to_builtins(message, str_keys=True)


def from_fields(fields: Any, kind: type[T]) -> T:
    """Return the message whose JSON values `to_fields` returned. ``kind`` may be a union.

    Raises:
        ValueError: the values are no message of this kind.
    """
    if kind is AgentMessage:
        _check_lengths(fields.get("report"))
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(f"{name}: {error}; driver, agents and ranks need the same Weft") from error


def encode(message: Any) -> bytes:
    """Return a message in JSON, in one line of ASCII."""
    return json.dumps(to_fields(message)).encode()


def decode(data: bytes | str, kind: type[T]) -> T:
    """Return the message in ``data``. For errors see `from_fields`."""
    return from_fields(json.loads(data), kind)


# From the driver to an agent


class AgentCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The command that an agent receives when it starts, as one line of JSON on its standard input.

    Attributes:
        generation: number of this agent. The driver accepts one agent of a host.
        slots: maximum number of ranks on this host.
        preload: modules for the forkserver.
        environment: variables to set, some of them secret.
        heartbeat_s: seconds between reports.
        orphan_s: seconds without a driver after which the agent ends its ranks and itself.
        stop_s: seconds in which ranks must end after a signal to this agent.
        launch: number of this start of the run. Memory checkpoints of earlier starts are removed.
        parent: process with which this agent and its ranks end, or 0 if the run outlives it.
        driver: command that starts the driver again, or empty if another agent does.
        yields_s: seconds that this agent waits for another agent of the host, whose imports are done, to reconnect
            first. 0 without another agent.
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
    driver: list[str] = []
    yields_s: float = 0.0

    @property
    def peer(self) -> str:
        """Return the name that the driver uses for this agent."""
        return f"{self.host}#{self.generation}"


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """The state to which an agent brings its host. A repeated message has no effect.

    Attributes:
        run: whether the ranks of that attempt run.
        ranks: global ranks of this host, in the order of their local ranks.
        target: ``module:function`` that a rank runs.
        in_process: whether ranks may take part in several attempts.
        drop: ranks whose processes must end with the previous attempt. None ends all processes.
        stop: the number of the signal that ends the run early, or 0.
        examine: whether the host is to be examined.
        end: whether the agent must end its ranks and itself.
        replaced: whether the agent must end because the host has another agent.
    """

    attempt: int = 0
    run: bool = False
    ranks: list[int] = []
    target: str = ""
    arguments: list[str] = []
    environment: dict[str, str] = {}
    in_process: bool = False
    drop: list[int] | None = None
    stop: int = 0
    examine: bool = False
    end: bool = False
    replaced: bool = False


# From an agent to the driver


class FaultKind(Enum):
    """Classes of faults."""

    input_error = "input_error"
    """The configuration, the data or the model is wrong. The next attempt would fail in the same way."""
    bad_numbers = "bad_numbers"
    """The loss or the gradient's norm was not finite or a spike too many times."""
    corruption = "corruption"
    """A replica's weights differ from the others'."""
    host_memory = "host_memory"
    """The host, or its control group, ran out of memory."""
    device_memory = "device_memory"
    """The accelerator ran out of memory."""
    disk_full = "disk_full"
    """The disk or shared memory that the rank writes to was full."""
    checkpoint = "checkpoint"
    """A checkpoint could not be read or written."""
    lost_peer = "lost_peer"
    """Another rank had ended or could not be reached. This fault is a consequence."""
    signal = "signal"
    """Killed by a signal."""
    stopped = "stopped"
    """Ended early because of a signal, with a checkpoint if there was a step to save."""
    other = "other"
    """Any other error."""


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """A rank's report of its end.

    Attributes:
        step: the step that was in progress or had just ended, counted from 1, or None before training.
        data: the range of that step's sequences in the global order: the first, and the one after the last.
        ranks: the culprits, if the error names other ranks than the one that ends.
    """

    kind: FaultKind
    message: str
    step: int | None = None
    data: tuple[int, int] | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankEnd(ErrorReport):
    """The end of a rank, from its exit status and its own report.

    Attributes:
        status: exit code, or minus the number of the signal that killed the rank.
    """

    status: int


class RowProgress(NamedTuple):
    """A rank's position in its schedule row. Positions in the same row are ordered by progress.

    Attributes:
        step: the step in execution, or the last one executed, or 0 before the first.
        done: number of slots of the row that have ended.
        begun: True if the next slot has begun.
        waits: number of waits begun plus waits ended in the slot, plus two per phase. Odd during a wait.
    """

    step: int
    done: int = 0
    begun: bool = False
    waits: int = 0


class LinkReading(NamedTuple):
    """Counters of a link to a rank at another site, since it was opened. See `weft.comm.wan.transport.LinkCounters`.

    Attributes:
        peer: global rank at the other end.
        ready: connections in use.
        rtt_s: shortest round trip, or 0 before the first.
        peak_bps: highest rate of acknowledged bits per second in the last seconds.
    """

    peer: int
    sent_bytes: int
    received_bytes: int
    resent_chunks: int
    broken: int
    ready: int
    rtt_s: float
    peak_bps: int = 0


GONE = ""
"""State of a process that does not exist any more."""


class RankReport(NamedTuple):
    """The state of a rank, from its record and its process.

    Attributes:
        attempt: the attempt that the rank was started for, or has joined since.
        phase: ``imports`` until it has written its first record.
        num_microbatches: number of micro-batches of its step.
        still_s: seconds since its last progress, or 0 before any.
        tick: counter of the rank's background thread. It does not change while another thread holds the interpreter's
            lock.
        busy_s: seconds of its own computations, over `measured_steps`.
        measured_steps: steps of the attempt whose computations have been measured.
        state: the process's letter in /proc; `GONE` once it has ended.
        exit_code: negative for a signal, or None while it lives.
        device_bytes: memory that it has allocated on its device.
        kept_step: step of the attempt's newest memory checkpoint that is complete on all hosts, or 0 before the first.
        links: readings of the links to ranks at other sites.
    """

    rank: int
    attempt: int
    phase: Phase = Phase.imports
    progress: RowProgress = RowProgress(0)
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


class HostReport(msgspec.Struct, frozen=True):
    """A heartbeat of a host: reports of its ranks, and its vital signs (`weft.engine.supervision.agent.reports`)."""

    host: str
    ranks: tuple[RankReport, ...]
    vitals: Mapping[str, Any] = {}


class AgentMessage(msgspec.Struct, frozen=True):
    """The state of a host, reported by its agent.

    Attributes:
        attempt: the attempt whose ranks the host has, or 0 before the first.
        ready: whether ranks can start at once, because the imports are done.
        ends: failures, by rank.
        lines: last lines of output of ranks that have failed.
        examined: the attempt after which the host was last examined, or 0 before the first examination.
        failed: the checks that failed in that examination.
        leaving: whether the agent has received a signal to end, because its host shuts down.
    """

    attempt: int
    ready: bool
    report: HostReport
    ends: Mapping[int, RankEnd]
    standby: Mapping[int, str]
    """Ranks on standby, with the reason for which they left the attempt."""
    lines: Mapping[int, list[str]]
    examined: int
    failed: Sequence[str]
    leaving: bool = False


def _check_lengths(report: Any) -> None:
    """Check the lengths of a `HostReport`'s lists in JSON, because msgspec fills missing fields with defaults."""
    rank_length, progress_length, link_length = (len(kind._fields) for kind in (RankReport, RowProgress, LinkReading))
    progress, links = RankReport._fields.index("progress"), RankReport._fields.index("links")
    try:
        whole = all(
            len(rank) == rank_length
            and len(rank[progress]) == progress_length
            and all(len(link) == link_length for link in rank[links])
            for rank in report["ranks"]
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"heartbeat: not of this form ({error!r}); driver and agents need the same Weft") from error
    if not whole:
        raise ValueError("heartbeat: a rank's report has another length; driver and agents need the same Weft")


# Between an agent and its forkserver


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to fork a process. Its output goes to two file descriptors that accompany the message.

    Attributes:
        name: unique while the process lives.
        target: ``module:function`` that it runs.
    """

    name: str
    target: str
    arguments: list[str]
    environment: dict[str, str] = {}


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to send a signal to a process, which is identified by its name."""

    name: str
    number: int


class Imported(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A notice that the imports are done. ``threads`` are the names of the forkserver's threads."""

    threads: list[str]


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A notice that a process was forked, or has ended with an exit code, which is negative for a signal."""

    name: str
    pid: int
    code: int | None = None


# Between an agent and a rank


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's membership in an attempt, which it reports to its agent.

    Attributes:
        joined: the attempt that it has joined, or None.
        leaving: whether it is releasing the attempt's resources.
        left: the reason for which it has left the attempt, or None.
    """

    joined: int | None = None
    leaving: bool = False
    left: str | None = None


class Leave(msgspec.Struct, frozen=True, tag=True):
    """A request to leave the attempt."""


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """A rank's assignment in the next attempt.

    Attributes:
        environment: variables that differ from those at the start of the process.
    """

    environment: Mapping[str, str]
    arguments: Sequence[str]
