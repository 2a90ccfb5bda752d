"""The peak of tensors on a CPU, by torch's profiler."""

from __future__ import annotations

import os
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


class TensorPeak:
    """Records allocations and releases of the calling thread, from its creation until `stop`."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints its stages
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def stop(self) -> int:
        """End the record, and return the peak in bytes."""
        self._profile.stop()
        assert self._profile.profiler is not None
        events = self._profile.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        return max(accumulate(num_bytes for _, num_bytes in changes), default=0)
