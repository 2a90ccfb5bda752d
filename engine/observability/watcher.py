"""Phases and progress of a rank, published to the supervisor that has started the rank, if there is one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from weft.conf.features import entry

if TYPE_CHECKING:
    import torch

    from weft.comm.links import SiteEndpoint
    from weft.engine.observability.event_timer import EventTimer
    from weft.engine.observability.flight_recorder import RecorderServer
    from weft.engine.observability.link_gauge import LinkGauge

from weft.pipeline.action import Slot
from weft.pipeline.timeline import Span


class SlotObserver(Protocol):
    """Observer of slots. The executor calls it on the thread that launches the work, so it must not block.

    If there are several observers, the first is called first at a beginning and last at an end.
    """

    def step_begins(self, num_microbatches: int) -> None:
        """Note the beginning of a step with its number of micro-batches."""
        ...

    def slot_begins(self, slot: Slot) -> None:
        """Note that the slot's work is about to be launched."""
        ...

    def slot_ends(self, slot: Slot) -> None:
        """Note that the slot's work has been launched. On a CPU it has ended."""
        ...


class BubbleObserver(SlotObserver, Protocol):
    """An observer of slots that publishes when the rank is idle, also in waits between slots."""

    def idle(self) -> None:
        """Note that the rank begins to wait."""
        ...

    def busy(self) -> None:
        """Note that the rank's wait has ended."""
        ...

    def replan(self, predicted: Sequence[Span]) -> None:
        """Note that the next steps run another schedule, with these computations of this rank."""
        ...

    def close(self) -> None:
        """Note the end of the engine."""
        ...


PROGRESS_PAGE = "WEFT_PROGRESS"
"""Environment variable of a supervised rank: path of this host's progress page."""
ERROR_FILE = "WEFT_ERROR_FILE"
"""Environment variable of a supervised rank: path of its error report."""


class Phase(IntEnum):
    """The phase of a rank. The supervisor's deadline depends on it."""

    imports = 0
    setup = 1
    first_step = 2
    steady = 3
    evaluation = 4
    checkpoint = 5
    finishing = 6
    standby = 7


class Waits(Protocol):
    """Observer of waits for other replicas."""

    def begin_wait(self, what: str = "sums") -> None:
        """Note that this rank begins to wait for ``what``: collectives of gradients or weights, or small sums."""
        ...

    def end_wait(self) -> None:
        """Note that this rank continues."""
        ...


class Watcher:
    """Receives the progress of a rank. This class ignores it, and a subclass in `weft.engine.supervision` publishes it.

    Attributes:
        waits: the supervisor's observer of waits in collectives, if any.
        timer: times events, if a collector reads them. The engine uses it after `WeftEngine.time_events`.
        recorder: answers with this rank's collective calls while events are timed.
        gauge: publishes the counters of links between sites meanwhile.
    """

    waits: Waits | None = None
    timer: EventTimer | None = None
    recorder: RecorderServer | None = None
    gauge: LinkGauge | None = None

    def enter(self, phase: Phase) -> None:
        """Publish the beginning of a phase."""

    def kept(self, step: int) -> None:
        """Publish that a memory checkpoint of ``step`` is complete on all hosts."""

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enter ``phase`` for the duration of the context, in which no step runs."""
        self.enter(phase)
        with self.timing(phase.name):
            yield
        self.enter(Phase.steady)

    def timing(self, section: str) -> AbstractContextManager[None]:
        """Return a context whose duration is recorded as a section's, if events are timed."""
        return nullcontext() if self.timer is None else self.timer.section(section)

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return the context of a step, whose duration is recorded if events are timed."""
        return nullcontext() if self.timer is None else self.timer.step(number)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for other ranks outside of transfers. All ranks enter it equally often in a step."""
        waits = self.observed_waits
        if waits is not None:
            waits.begin_wait()
        yield
        if waits is not None:
            waits.end_wait()

    @property
    def observed_waits(self) -> Waits | None:
        """The observer of waits: the timer, which passes them on to `waits`, or `waits` itself."""
        return self.timer or self.waits

    def observers(self, steps_done: Callable[[], int], is_planned: Callable[[], bool]) -> list[SlotObserver]:
        """Return observers of slots.

        Args:
            steps_done: returns the number of steps before the one that begins.
            is_planned: returns whether the schedules of the run's plan are those that run.
        """
        return []

    def follow(self, device: torch.device, links: SiteEndpoint | None, peers: Collection[int]) -> None:
        """Publish the memory of ``device`` and the counters of the links to ``peers``, until the attempt ends."""

    def measured(self, busy_s: Callable[[], float]) -> None:
        """Publish the computation time of a step that the device has finished. ``busy_s`` returns it on demand."""

    def close(self) -> None:
        """Stop publishing, because the rank ends."""
        self.stop_timing()

    def stop_timing(self, *, finished: bool = False) -> None:
        """End the records of events, which a collector may still read. ``finished`` is True at the end of a run."""
        if self.timer is not None:
            self.timer.close(finished=finished)
        for each in (self.recorder, self.gauge):
            if each is not None:
                each.close()
        self.timer = self.recorder = self.gauge = None


def watcher_of(variables: Mapping[str, str]) -> Watcher:
    """Return the watcher of a rank with these environment variables.

    Raises:
        ValueError: the progress page that they name cannot be used.
    """
    if not variables.get(PROGRESS_PAGE):
        return Watcher()
    watcher: Watcher = entry("supervision").watcher(variables)
    return watcher
