"""A rank's link to its agent: progress on the host's page, membership in attempts, and the error
report. This module loads without torch.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING

from weft.conf.host.private import write_private
from weft.conf.host.processes import own_start, peer_process
from weft.conf.host.threads import Thread
from weft.engine.observability.watcher import PROGRESS_PAGE, Phase, Watcher
from weft.engine.supervision.faults import LONGEST_MESSAGE
from weft.engine.supervision.messages import (
    AGENT,
    ATTEMPT,
    MOST_BYTES,
    Assignment,
    ErrorReport,
    Leave,
    LinkReading,
    Membership,
    decode,
    encode,
)
from weft.engine.supervision.progress_page import (
    BEGUN,
    DONE,
    FIRST_LINK,
    HEADER,
    LINK,
    MOST_LINKS,
    MOST_STEP,
    MOST_WAITS,
    RECORD,
    STEP,
    Header,
    Word,
    map_page,
)
from weft.pipeline.action import COMPUTE, Op, Slot

if TYPE_CHECKING:
    import torch

    from weft.comm.links import SiteEndpoint
    from weft.engine.observability.watcher import SlotObserver

TICK_S = 0.1
"""Seconds between ticks of a rank's background thread."""
MEASURE_EVERY_S = 2.0
"""Seconds between steps whose computations are timed on the device, because each mark takes microseconds."""
PEAK_TICKS = 20
"""Number of recent ticks from which a link's peak speed is taken."""
_PROGRESS, _MOVED = int(Word.PROGRESS), int(Word.MOVED)


class Heartbeat(Watcher):
    """A watcher that writes to this rank's record on its host's progress page.

    A background thread, which needs the interpreter's lock, increments the record's tick.

    `slot_begins` and `slot_ends` implement `weft.engine.observability.watcher.SlotObserver`.
    """

    def __init__(self, path: Path, *, local_rank: int, rank: int, attempt: int) -> None:
        """Take over the record of ``local_rank``, in the phase set-up.

        Raises:
            ValueError: there is no such page, or it has no record for this rank.
        """
        page = map_page(path)
        if not 0 <= local_rank < page[Header.RANKS]:
            raise ValueError(f"{path}: room for {page[Header.RANKS]} ranks, none for local rank {local_rank}")
        first = HEADER + local_rank * RECORD
        self._words = page[first : first + RECORD]
        self._ended = self._moved = self._busy_ns = self._depth = 0
        self._gauges: list[Callable[[], None]] = []
        self._gauging = threading.Lock()
        self._own: frozenset[Op] = COMPUTE
        self._closing = threading.Event()
        self._on_device, self._measured_at, self.waits = False, 0.0, self
        self.begin_attempt(attempt, rank=rank)
        self._thread = Thread(self._tick, name="weft-progress")
        self._thread.start()

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Heartbeat:
        """Return the heartbeat of a rank, from torchrun's variables, ``WEFT_PROGRESS`` and ``WEFT_ATTEMPT``.

        Raises:
            ValueError: ``WEFT_PROGRESS`` is not the path of a progress page with a record for this rank.
        """
        attempt = int(variables.get(ATTEMPT, "0"))
        local_rank, rank = int(variables["LOCAL_RANK"]), int(variables["RANK"])
        return cls(Path(variables[PROGRESS_PAGE]), local_rank=local_rank, rank=rank, attempt=attempt)

    def observers(self, steps_done: Callable[[], int], is_planned: Callable[[], bool]) -> list[SlotObserver]:
        """Return the observer that writes to the record."""
        return [ProgressObserver(self, steps_done, is_planned)]

    def follow(self, device: torch.device, links: SiteEndpoint | None, peers: Collection[int]) -> None:
        """Let the record's thread read the memory of ``device`` and the counters of ``links``."""
        if device.type == "cuda":
            from torch.cuda import memory_allocated

            self._on_device = True
            self.measure_device()
            self.gauge_device(partial(memory_allocated, device))
        if links is not None:
            self.gauge_links(lambda: [_reading(links, peer) for peer in peers])

    def measured(self, busy_s: Callable[[], float]) -> None:
        """Publish a step's computation time on the device, which ``busy_s`` returns, unless the last one is recent."""
        if self._on_device and monotonic() - self._measured_at > MEASURE_EVERY_S:
            self._measured_at = monotonic()
            self.add_busy(busy_s())

    def begin_attempt(self, attempt: int, *, rank: int) -> None:
        """Reset the record, because the process takes part in another attempt, possibly as another rank."""
        words = self._words
        words[Word.GENERATION] |= 1
        words[Word.ATTEMPT], words[Word.RANK] = attempt, rank
        words[Word.PID], words[Word.STARTED] = os.getpid(), own_start()
        self._ended = self._moved = self._busy_ns = self._depth = 0
        for index in (Word.PROGRESS, Word.KIND, Word.BUSY, Word.MEASURED, Word.DEVICE, Word.KEPT, Word.LINKS):
            words[index] = 0
        words[Word.PHASE], words[Word.MOVED] = Phase.setup, monotonic_ns()
        self.drop_gauges()
        words[Word.GENERATION] += 1

    def enter(self, phase: Phase) -> None:
        """Begin a phase. After the first step this also changes the progress word."""
        self._words[Word.PHASE] = phase
        if self._words[Word.PROGRESS]:
            self._mark(2)
        self._words[Word.MOVED] = monotonic_ns()

    def measure_device(self) -> None:
        """Stop timing computations on the host. The device's times are added by `add_busy`."""
        self._own = frozenset()

    def kept(self, step: int) -> None:
        """Record that a memory checkpoint of ``step`` is complete on all hosts."""
        self._words[Word.KEPT] = step

    def add_busy(self, seconds: float) -> None:
        """Record the computation time of one step."""
        self._busy_ns += round(seconds * 1e9)
        self._words[Word.BUSY] = self._busy_ns
        self._words[Word.MEASURED] += 1

    def begin_step(self, step: int, num_microbatches: int) -> None:
        """Begin a step, counted from 1."""
        words = self._words
        words[Word.KIND] = num_microbatches
        if self._own and self._ended >= STEP:  # not the first step
            words[Word.BUSY] = self._busy_ns
            words[Word.MEASURED] += 1
        self._ended = words[Word.PROGRESS] = (step & MOST_STEP) * STEP
        words[Word.MOVED] = monotonic_ns()

    def slot_begins(self, slot: Slot) -> None:
        """Mark the beginning of the row's next slot."""
        words = self._words
        words[_PROGRESS] = self._ended | BEGUN
        words[_MOVED] = self._moved = monotonic_ns()

    def slot_ends(self, slot: Slot) -> None:
        """Mark the end of the slot."""
        words = self._words
        self._ended = words[_PROGRESS] = self._ended + DONE
        words[_MOVED] = now = monotonic_ns()
        if slot[0][0] in self._own:
            self._busy_ns += now - self._moved

    def begin_wait(self, what: str = "") -> None:
        """Mark that the rank waits for others. Waits may be nested, and the outermost counts."""
        self._depth += 1
        if self._depth == 1:
            self._mark(1)

    def end_wait(self) -> None:
        """End the wait that `begin_wait` announced."""
        self._depth -= 1
        if not self._depth:
            self._mark(1)

    def _mark(self, marks: int) -> None:
        word = self._words[Word.PROGRESS]
        # At the end of the counter's range, odd and even still distinguish waiting from work.
        self._words[Word.PROGRESS] = word + marks if word & MOST_WAITS < MOST_WAITS - 2 else word ^ (marks & 1)
        self._words[Word.MOVED] = monotonic_ns()

    def gauge_device(self, allocated_bytes: Callable[[], int]) -> None:
        """Let the background thread read the device's allocated memory."""

        def read() -> None:
            self._words[Word.DEVICE] = allocated_bytes()

        with self._gauging:
            self._gauges.append(read)

    def gauge_links(self, counters: Callable[[], Sequence[LinkReading]]) -> None:
        """Let the background thread read the counters of at most `MOST_LINKS` links, and measure their speed."""
        rates: dict[int, deque[float]] = {}
        before: dict[int, tuple[int, int]] = {}

        def read() -> None:
            now = monotonic_ns()
            for number, link in enumerate(counters()[:MOST_LINKS]):
                sent, at_ns = before.get(link.peer, (link.sent_bytes, now - 1))
                kept = rates.setdefault(link.peer, deque(maxlen=PEAK_TICKS))
                kept.append((link.sent_bytes - sent) * 8e9 / (now - at_ns))
                before[link.peer] = link.sent_bytes, now
                values = (*link[:-2], round(link.rtt_s * 1e9), max(0, round(max(kept))))
                for offset, value in enumerate(values):
                    self._words[FIRST_LINK + number * LINK + offset] = value
                self._words[Word.LINKS] = max(number + 1, self._words[Word.LINKS])

        with self._gauging:
            self._gauges.append(read)

    def drop_gauges(self) -> None:
        """Remove all gauges, because their sources are about to be closed."""
        with self._gauging:
            self._gauges.clear()

    def _tick(self) -> None:
        ticks = 0
        while not self._closing.wait(TICK_S):
            ticks += 1
            self._words[Word.TICK] = ticks
            with self._gauging:
                self._gauges[:] = [read for read in self._gauges if _succeeds(read)]

    def close(self) -> None:
        """Stop the thread. The record stays on the page, so that the agent can read how the rank ended."""
        super().close()
        self._closing.set()
        self._thread.join()


def _succeeds(read: Callable[[], None]) -> bool:
    """Read a gauge. Return False if that failed because its source is closed, which must not end the ticks."""
    try:
        read()
    except (RuntimeError, OSError, ValueError):
        return False
    return True


class ProgressObserver:
    """An observer of slots that writes each beginning and end to the host's page. See `SlotObserver`."""

    def __init__(self, heartbeat: Heartbeat, steps_done: Callable[[], int], is_planned: Callable[[], bool]) -> None:
        self._heartbeat, self._steps_done, self._is_planned = heartbeat, steps_done, is_planned
        self.slot_begins, self.slot_ends = (
            heartbeat.slot_begins,
            heartbeat.slot_ends,
        )  # with no call between: each takes time

    def step_begins(self, num_microbatches: int) -> None:
        """Publish the beginning of a step; without a number if its rows are not those of the plan's file."""
        self._heartbeat.begin_step(self._steps_done() + 1, num_microbatches if self._is_planned() else 0)


def _reading(links: SiteEndpoint, peer: int) -> LinkReading:
    found = links.counters(peer)
    return LinkReading(
        peer=peer,
        sent_bytes=found.sent_bytes,
        received_bytes=found.received_bytes,
        resent_chunks=found.resent_chunks,
        broken=found.broken,
        ready=found.ready,
        rtt_s=found.rtt_s,
    )


class AgentLink:
    """A rank's connection to its agent."""

    def __init__(self, path: Path) -> None:
        """Connect to the agent's socket.

        Raises:
            OSError: no process listens there.
            ValueError: the listener belongs to another user.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(path))
        if peer_process(self._socket)[1] != os.getuid():
            raise ValueError(f"{AGENT}={path}: another user listens there")
        self._assignments: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        self._on_leave: Callable[[], None] | None = None
        self._leaving = False
        self._changing = threading.Lock()
        Thread(self._receive, name="weft-agent").start()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AgentLink | None:
        """Connect to the agent that ``WEFT_AGENT`` names, or return None if restarts in this process are off."""
        path = environment.get(AGENT)
        return cls(Path(path)) if path else None

    @property
    def leaving(self) -> bool:
        """True if the agent has requested that this rank leave its attempt."""
        return self._leaving

    def begin(self, attempt: int, on_leave: Callable[[], None]) -> None:
        """Report that this rank takes part in an attempt.

        Args:
            on_leave: called on a thread, at most once, when the agent requests to leave it.
        """
        with self._changing:
            self._leaving, self._on_leave = False, on_leave
        self._send(Membership(joined=attempt))

    def tell_leaving(self) -> None:
        """Report that this rank is releasing its attempt's resources, which may take a while."""
        with suppress(OSError):  # `stand_by` handles it
            self._send(Membership(leaving=True))

    def stand_by(self, reason: str) -> Assignment | None:
        """Report that this rank has left its attempt. Wait for the next assignment, or None if the process must end."""
        with self._changing:
            self._on_leave = None
        try:
            self._send(Membership(left=reason[:4000]))
        except OSError:
            return None
        return self._assignments.get()

    def _send(self, state: Membership) -> None:
        self._socket.send(encode(state))

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(MOST_BYTES)
            except OSError:
                data = b""
            if not data:
                return self._assignments.put(None)
            message: Leave | Assignment = decode(data, Leave | Assignment)  # type: ignore[arg-type]
            if isinstance(message, Leave):
                with self._changing:
                    act, self._on_leave = self._on_leave, None
                    self._leaving = True
                if act is not None:
                    act()
            else:
                self._assignments.put(message)


def write_report(path: Path, report: ErrorReport) -> None:
    """Write an error file that only this user can read. An existing file stays, because the first error is the cause.

    Raises:
        OSError: the file cannot be written.
    """
    if path.exists():
        return
    write_private(path, encode(replace(report, message=report.message[:LONGEST_MESSAGE])).decode() + "\n")
