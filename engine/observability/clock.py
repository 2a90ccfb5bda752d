"""Marks in time that do not block the device: host time on CPUs, CUDA events on GPUs."""

from __future__ import annotations

from time import monotonic_ns, perf_counter, time
from typing import Any, Protocol

import torch

TIES = 5
"""Number of tries to align the device's clock with the host's."""
TIE_EVERY_NS = 5_000_000_000
"""Nanoseconds after which the two may have drifted apart."""


class Clock(Protocol):
    """Sets marks in time, which are read later."""

    def mark(self) -> Any:
        """Return a mark at the current point of this rank's work."""
        ...

    def seconds(self, start: Any, mark: Any) -> float:
        """Return the seconds from ``start`` to ``mark``. Waits until the device has passed both."""
        ...

    def wall_s(self, mark: Any) -> float:
        """Return the seconds since the epoch at which the device passed a mark. Waits until it has."""
        ...


class HostClock:
    """Clock for computations that have ended when their call returns."""

    def mark(self) -> float:
        """Return the host's monotonic time in seconds."""
        return perf_counter()

    def seconds(self, start: float, mark: float) -> float:
        """Return the seconds between two marks."""
        return mark - start

    def wall_s(self, mark: float) -> float:
        """Return the seconds since the epoch at a mark."""
        return time() - (perf_counter() - mark)


class CudaClock:
    """Clock for kernels that are queued on the current stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, mark: torch.cuda.Event) -> float:
        """Return the seconds between two events. Synchronises on the later one."""
        mark.synchronize()
        return start.elapsed_time(mark) / 1000

    def wall_s(self, mark: torch.cuda.Event) -> float:
        """Return the seconds since the epoch at which the device passed an event. Waits until it has."""
        now = self.mark()
        now.synchronize()
        return time() - mark.elapsed_time(now) / 1000


class DeviceTimes:
    """Reads the host times at which a device passed events. The time of reading has no influence.

    An event on a separate stream, between two reads of the host's clock, aligns the device's clock with the host's.
    Of several tries, the one with the least time between the reads counts.
    """

    def __init__(self, device: torch.device) -> None:
        """Align the clocks. The device must be idle, so that it runs an event at once."""
        self._stream = torch.cuda.Stream(device)
        self._tie()

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream. A thread can wait for it without spinning."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def passed_ns(self, event: torch.cuda.Event) -> int:
        """Return the value of `time.monotonic_ns` when the device passed ``event``. Waits until it has."""
        event.synchronize()
        if monotonic_ns() - self._tied_ns > TIE_EVERY_NS:
            self._tie()
        return self._tied_ns + round(self._tied.elapsed_time(event) * 1e6)

    def _tie(self) -> None:
        found = []
        for _ in range(TIES):
            event = torch.cuda.Event(enable_timing=True)
            before = monotonic_ns()
            event.record(self._stream)
            event.synchronize()
            after = monotonic_ns()
            found.append((after - before, (before + after) // 2, event))
        _, self._tied_ns, self._tied = min(found, key=lambda tie: tie[0])


def clock_for(device: torch.device) -> Clock:
    """Return a clock for computations on ``device``."""
    return CudaClock() if device.type == "cuda" else HostClock()
