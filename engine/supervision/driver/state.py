"""The state of a run that the journal restores, and the effects that a run has on the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, Protocol

from weft.conf.schema import SuperviseConfig
from weft.engine.planning.next_attempt import NextAttempt
from weft.engine.supervision.driver.culprit import JobRows
from weft.engine.supervision.driver.fleet import Fleet
from weft.engine.supervision.driver.hosts import Layout
from weft.engine.supervision.driver.limits import Budget, SiteTimeout
from weft.engine.supervision.messages import DesiredState


@dataclass(frozen=True)
class StopRequest:
    """A request, by a signal, to end the run early.

    Attributes:
        limit: time at which the run ends even if ranks have not.
        memory: whether memory checkpoints may hold steps that storage lacks.
    """

    signal: int
    limit: float
    memory: bool


class Stage(Enum):
    """The stage of an attempt, from its start to its end."""

    starting = "starting"
    running = "running"
    stopping = "stopping"
    examining = "examining"
    restarting = "restarting"
    ended = "ended"


class JobState:
    """The part of a run's state that outlives its driver.

    Attributes:
        code: exit code of the run, once it has ended.
        adapted: settings that attempts on the same hosts have besides the run's own, by a change of costs.
        has_undone: True if no step has succeeded with such settings, so that no others are tried.
    """

    def __init__(self, settings: SuperviseConfig, fleet: Fleet, site_timeout: SiteTimeout) -> None:
        self._settings, self.fleet, self._site_timeout = settings, fleet, site_timeout
        self.code: int | None = None
        self.adapted: tuple[str, ...] = ()
        self.has_undone = False
        self.stage = Stage.starting
        self.attempt = self._most_ranks = 0
        self._layout = Layout({}, ("", 0), ())
        self._budget = Budget(settings)
        self._stop_request: StopRequest | None = None

    def replay(self, event: Mapping[str, Any]) -> None:
        """Apply an event of the journal."""
        self.fleet.replay(event)
        match event["event"]:
            case "launch":
                self._budget = Budget(self._settings)
                self._most_ranks, self._stop_request = 0, None
                self.adapted, self.has_undone = (), False
                self.stage = Stage.starting
                self._layout = Layout({}, ("", 0), ())
            case "attempt":
                self.attempt = event["attempt"]
                if event["slots"] != dict(self._layout.slots):
                    self.adapted = ()  # the costs of other hosts are not known
                self.stage = Stage.starting
                self._layout = Layout(event["slots"], tuple(event["master"]), tuple(event["arguments"]))
                self._site_timeout.began(event.get("at"))
                self._most_ranks = max(self._most_ranks, self._layout.num_ranks)
                if event["reason"] in ("restart", "shrink"):
                    self._budget.saw_restart()
            case "fault":
                self._budget.saw_fault(event["kind"], event["culprit"], event.get("step"))
                self.undo()
                self.stage = Stage.stopping
            case "adapt":
                self.adapted = tuple(event["arguments"])
            case "imported":
                self._site_timeout.imported(event.get("at"))
            case "good_step":
                self._budget.saw_good_step()
                self._site_timeout.came_to_step(event.get("at"))
                self.stage = Stage.running
            case "stop":
                self._stop_request = StopRequest(event["signal"], inf, event["memory"])
            case "end":
                self.stage = Stage.ended

    def undo(self) -> tuple[str, ...]:
        """Drop and return the changed settings if no step has succeeded with them."""
        undone = self.adapted if self.stage is Stage.starting else ()
        if undone:
            self.adapted, self.has_undone = (), True
        return undone

    def kind_of_start(self, reason: str, layout: Layout) -> str:
        """Return ``reason``, or "shrink" or "grow" if a restart changes the number of ranks."""
        if reason == "restart" and layout.num_ranks < self._layout.num_ranks:
            return "shrink"
        return "grow" if reason == "restart" and layout.num_ranks > self._layout.num_ranks else reason


class Effects(Protocol):
    """Side effects of a job: processes, messages, files and output."""

    def start_agent(self, host: str, generation: int) -> None:
        """Start an agent on a host."""

    def send_state(self, host: str, generation: int, state: DesiredState) -> None:
        """Send an agent the desired state of its host, now or when it connects."""

    def record(self, event: str, **fields: Any) -> None:
        """Append an event to the journal."""

    def say(self, text: str) -> None:
        """Print a line for the user."""

    def rows(self) -> JobRows | None:
        """Return the schedule rows of all ranks, from the plan in the run's folder, or None if it cannot be read.

        Raises:
            TimeoutError: storage hangs; call this again later.
        """

    def plan_time(self) -> int:
        """Return a number that changes when ranks write another plan, if the run adapts its schedule."""

    def next_attempt(self) -> NextAttempt | None:
        """Return what ranks want to change at their next checkpoint, if the run adapts."""

    def differing_calls(self, stalled_s: float) -> str:
        """Return the collective call at which ranks differ, if their calls were stored in a stall of so many seconds.

        Empty if none is known.
        """

    def denied(self) -> Mapping[str, str]:
        """Return the reason for each of the run's hosts that is on the deny-list."""

    def deny(self, host: str, reason: str) -> None:
        """Add a host to the deny-list."""

    def newest_checkpoint(self) -> str:
        """Return the name of the run's newest checkpoint, or empty if there is none."""
