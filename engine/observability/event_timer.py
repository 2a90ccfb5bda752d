"""The event timer: every action, wait and stall of a rank, timed into a ring that outlives the rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch

from weft.engine.observability.clock import DeviceTimes
from weft.engine.observability.event_ring import RingWriter, encode, encode_slot, rings_folder
from weft.engine.observability.watcher import Waits
from weft.pipeline.action import COMPUTE, Action, Op, Slot

STEPS_KEPT = 8
"""Steps that a ring holds at least, if the collector does not read it."""
LEAST_RECORDS = 4096
OTHER_RECORDS = 64
"""Records of a step besides its slots and their waits."""
TRIALS, TURNS = 100, 5
"""Events that are timed together when a run begins, and how often: the fastest are the least disturbed."""
MOST_PENDING = 100_000
"""Records that wait for the device. Older ones are dropped."""


class EventTimer:
    """Times one rank. It is also an observer of waits (`Waits`), which it passes on to ``inner``.

    On a CPU the host's clock is read. On a GPU slots and waits are CUDA events, which are read in a later step, after
    the device has passed them. So nothing synchronises.
    """

    def __init__(self, ring: RingWriter, device: torch.device, inner: Waits | None = None) -> None:
        self._ring, self._inner = ring, inner
        self._step = self._depth = 0
        self._codes: dict[Slot, tuple[int, int]] = {}
        self._slot: Slot = ()
        self._device = DeviceTimes(device) if device.type == "cuda" else None
        self._mark: Any = perf_counter if self._device is None else self._device.mark
        self._pending: deque[tuple[int, int, int, Any, Any]] = deque(maxlen=MOST_PENDING)

    @classmethod
    def open(
        cls, folder: Path, rank: int, longest_row: int, device: torch.device, inner: Waits | None = None
    ) -> EventTimer:
        """Return a timer with a ring for the run in ``folder``.

        Raises:
            OSError, ValueError: shared memory cannot be used. See `RingWriter`.
        """
        needed = STEPS_KEPT * (2 * longest_row + OTHER_RECORDS)
        trial = RingWriter(rings_folder(folder), rank, TRIALS, "trial")
        trial.remove()
        event_s = cls(trial, device).event_s()
        ring = RingWriter(rings_folder(folder), rank, max(LEAST_RECORDS, needed))
        ring.state_cost(event_s)
        return cls(ring, device, inner)

    def event_s(self) -> float:
        """Return the processor time of an event on this host, by writing some. For a ring that nothing reads."""
        slot, turns = (Action(Op.F, 0, 0),), []
        for _ in range(TURNS):
            begun_s = thread_time()
            for _ in range(TRIALS):
                self.slot_begins(slot)
                self.slot_ended(slot, self._mark(), self._mark())
            self._read_device()
            turns.append(thread_time() - begun_s)
        return min(turns) / TRIALS

    def slot_begins(self, slot: Slot) -> None:
        """Publish the slot that runs from now on."""
        codes = self._codes.get(slot)
        if codes is None:
            codes = self._codes[slot] = encode_slot(slot)
        self._slot = slot
        self._ring.begin(*codes, self._step, perf_counter())

    def slot_ended(self, slot: Slot, start: Any, end: Any) -> None:
        """Add a slot with the marks of the run's clock at its beginning and end."""
        codes = self._codes.get(slot) or encode_slot(slot)
        self._slot = ()
        self._add(*codes, start, end)

    def _add(self, first: int, second: int, start: Any, end: Any) -> None:
        if self._device is None:
            self._ring.write(first, second, self._step, start, end)
        else:
            self._pending.append((first, second, self._step, start, end))

    def begin_wait(self, what: str = "sums") -> None:
        """Begin to wait for a collective of this kind. Waits may be nested, and the outermost counts."""
        self._depth += 1
        if self._depth == 1:
            self._waits_for, self._wait_begun = what, self._mark()
        if self._inner is not None:
            self._inner.begin_wait(what)

    def end_wait(self) -> None:
        """End the wait that `begin_wait` announced. One inside of a computation has its virtual stage."""
        self._depth -= 1
        if not self._depth:
            slot = self._slot
            stage = slot[0].stage if slot and slot[0].op in COMPUTE else -1
            self._add(encode(self._waits_for, stage), 0, self._wait_begun, self._mark())
        if self._inner is not None:
            self._inner.end_wait()

    @contextmanager
    def section(self, kind: str) -> Iterator[None]:
        """Time a section on the host: one of `SECTIONS`."""
        start = perf_counter()
        try:
            yield
        finally:
            self._ring.write(encode(kind), 0, self._step, start, perf_counter())

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Time a step. The events until the next one belong to it."""
        self._step = number
        self._read_device()
        with self.section("step"):
            yield

    def _read_device(self) -> None:
        """Write the events that the device has passed to the ring. Does not wait for the others."""
        pending, device = self._pending, self._device
        while pending and pending[0][-1].query():
            assert device is not None, "only a device's events are pending"
            first, second, step, start, end = pending.popleft()
            self._ring.write(first, second, step, device.passed_ns(start) / 1e9, device.passed_ns(end) / 1e9)

    def close(self, *, finished: bool) -> None:
        """End the records. The ring stays for the collector. ``finished`` is True at the end of a run."""
        self._read_device()
        self._ring.close(finished=finished)
