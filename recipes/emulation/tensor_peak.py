"""The peak of tensors on a CPU, by torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from ctypes import CDLL, c_bool
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class TensorPeak:
    """Records the allocated bytes of all threads at each allocation of the calling one, until `stop`.

    torch records the sum over all threads only if a flag of its C++ library is set. Without it, a tensor that another
    thread frees counts as allocated for ever: gloo's threads free what they finish after the caller.
    """

    def __init__(self) -> None:
        library = CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True  # left set: the sum stays exact
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints its stages
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()
        torch.empty(1)  # the first event, which shows the bytes at the beginning

    def stop(self) -> int:
        """End the record, and return the peak in bytes, beyond what was allocated at its beginning."""
        self._profile.stop()
        assert self._profile.profiler is not None
        events = self._profile.profiler.kineto_results.experimental_event_tree()
        _, *allocated = _sums(sorted(_allocations(events)))
        return max(allocated) - allocated[0]


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Yield time, address and bytes (negative if freed) of each allocation, and the sum over all threads after it."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            yield event.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated


def _sums(allocations: Iterable[tuple[int, int, int, int]]) -> Iterator[int]:
    """Yield the allocated bytes after each allocation, with mapped files, whose events have a sum of zero."""
    total, mapped = 0, dict[int, int]()
    for _, address, num_bytes, allocated in allocations:
        if num_bytes > 0 and not allocated:
            mapped[address] = num_bytes
        elif num_bytes > 0 or (num_bytes < 0 and mapped.pop(address, None) is None):
            total = allocated
        yield total + sum(mapped.values())
