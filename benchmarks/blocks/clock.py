"""Time and memory of a computation and its backward: by CUDA events on a GPU, otherwise by the host's clock."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.recipes.emulation.tensor_peak import TensorPeak

WARM, LEAST, MOST = 3, 3, 50
"""Runs before those that are timed, and limits of the number of these."""
FLUSHED_BYTES = 256 << 20
"""Bytes that are written before each run, several times a GPU's cache: in training, other layers run in between."""


class Passes(NamedTuple):
    """A computation.

    Attributes:
        prepare: makes the inputs and clears gradients. It is not timed.
        forward: maps the inputs to what the backward needs.
        backward: returns the output and the gradients, by name.
    """

    prepare: Callable[[], Any]
    forward: Callable[[Any], Any]
    backward: Callable[[Any], dict[str, Tensor]]

    def run(self) -> dict[str, Tensor]:
        """Run all three."""
        return self.backward(self.forward(self.prepare()))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A computation's time, memory and results.

    Attributes:
        forward_s, backward_s: medians.
        peak_bytes: peak of what a run allocates: activations, temporary tensors and gradients, but not weights.
        results: the output and the gradients, by name.
    """

    forward_s: float
    backward_s: float
    peak_bytes: int
    results: dict[str, Tensor]

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def difference(self, base: Measured) -> float:
        """Return the largest difference of a result from that of ``base``, as a share of its norm."""
        pairs = ((self.results[name].float(), wanted.float()) for name, wanted in base.results.items())
        return max(float((got - wanted).norm() / wanted.norm()) for got, wanted in pairs)


class Clock:
    """Measures computations on one device."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        """Allocate what is written to empty a GPU's cache.

        Args:
            seconds: approximate time of the timed runs of a computation.
        """
        self.device, self._seconds, self._on_gpu = device, seconds, device.type == "cuda"
        self._flushed = torch.empty(FLUSHED_BYTES if self._on_gpu else 0, dtype=torch.int8, device=device)

    def measure(self, passes: Passes) -> Measured:
        """Run a computation several times. The host does not wait in between, so it may run ahead of a GPU."""
        for _ in range(WARM):  # compiles, and fills the allocator's cache
            results = passes.run()
        results = {name: tensor.detach().clone() for name, tensor in results.items()}
        self._finish()
        began = perf_counter()
        passes.run()
        self._finish()
        count = min(MOST, max(LEAST, int(self._seconds / (perf_counter() - began))))
        marks = [self._timed(passes) for _ in range(count)]
        self._finish()
        return Measured(
            forward_s=median(_between(begin, middle) for begin, middle, _ in marks),
            backward_s=median(_between(middle, end) for _, middle, end in marks),
            peak_bytes=self._peak(passes),
            results=results,
        )

    def _timed(self, passes: Passes) -> tuple[Any, Any, Any]:
        inputs = passes.prepare()
        self._flushed.zero_()
        begin = self._mark()
        passed = passes.forward(inputs)
        middle = self._mark()
        passes.backward(passed)
        return begin, middle, self._mark()

    def _mark(self) -> Any:
        """Return the time, or an event whose time is known when the device has finished."""
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _peak(self, passes: Passes) -> int:
        inputs = passes.prepare()
        gc.collect()
        if not self._on_gpu:
            peak = TensorPeak()
            passes.backward(passes.forward(inputs))
            return peak.stop()
        self._finish()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        passes.backward(passes.forward(inputs))
        return torch.cuda.max_memory_allocated(self.device) - before

    def _finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
