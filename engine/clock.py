"""Marks in time that do not stall the device: host time on CPUs, CUDA events on GPUs."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks now, tells their times later."""

    def mark(self) -> Any:
        """A point in this rank's order of work."""
        ...

    def seconds(self, start: Any, mark: Any) -> float:
        """Seconds from one mark to another; waits until the device has passed both."""
        ...


class HostClock:
    """For compute that has ended when the call returns."""

    def mark(self) -> float:
        """Host time in seconds."""
        return perf_counter()

    def seconds(self, start: float, mark: float) -> float:
        """Seconds between two marks."""
        return mark - start


class CudaClock:
    """For kernels that are queued on the current stream."""

    def mark(self) -> torch.cuda.Event:
        """An event recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, mark: torch.cuda.Event) -> float:
        """Seconds between two events; synchronises on the later one."""
        mark.synchronize()
        return start.elapsed_time(mark) / 1000


def clock_for(device: torch.device) -> Clock:
    """The clock that suits ``device``."""
    return CudaClock() if device.type == "cuda" else HostClock()
