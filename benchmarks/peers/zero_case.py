"""The case of data-parallel engines: emulated layers with weights to reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist

from benchmarks.peers.emulated_stage import EmulatedLayer, EmulatedWork

Span = tuple[str, float, float]
"""A computation (F, I, W), with its start and end by `perf_counter`."""


@dataclass(frozen=True, kw_only=True)
class ZeroCase:
    """A model of emulated layers, trained on a few ranks with one amount of compute after the other.

    Attributes:
        compute_s: seconds of a rank's forwards and backwards in a step, each tried in turn. A
            forward, an input gradient and a weight gradient take a third each.
        num_layers: number of layers of the whole model.
        layer_elements: fp32 parameters of a layer.
        num_microbatches: micro-batches per step and rank, without a pipeline.
        num_warmup, num_steps: numbers of warm-up steps and of measured steps. Each value of ``compute_s`` takes both.
        timeout_s: seconds after which a collective fails.
        cache_dir: folder of Weft's measurements.
    """

    compute_s: tuple[float, ...]
    cache_dir: str
    num_layers: int = 8
    layer_elements: int = 1 << 17
    num_microbatches: int = 1
    num_warmup: int = 1
    num_steps: int = 3
    timeout_s: float = 120.0

    @property
    def num_elements(self) -> int:
        """Number of parameters of the model."""
        return self.num_layers * self.layer_elements

    def work(self, compute_s: float) -> EmulatedWork:
        """Return the work of one layer if a step's compute takes ``compute_s``."""
        each = compute_s / (3 * self.num_layers * self.num_microbatches)
        return EmulatedWork(
            forward_s=each, input_s=each, weight_s=each, hidden_bytes=1024, weight_elements=self.layer_elements
        )


@dataclass(frozen=True)
class ZeroRun:
    """The measurements of one rank for one amount of compute.

    Attributes:
        ends_s: when the last warm-up step and each measured step ended, by `perf_counter`.
        spans: all computations since the first of these times.
    """

    ends_s: tuple[float, ...]
    spans: tuple[Span, ...]

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of each measured step."""
        return tuple(b - a for a, b in zip(self.ends_s, self.ends_s[1:], strict=False))


def time_computes(case: ZeroCase, layers: Iterable[EmulatedLayer], step: Callable[[], object]) -> list[ZeroRun]:
    """Run the steps of each of ``case.compute_s``.

    There is no barrier between steps, so that unfinished work of one step delays the next.
    """
    layers = list(layers)
    runs = []
    for compute_s in case.compute_s:
        work = case.work(compute_s)
        for layer in layers:
            layer.work = work
        dist.barrier()
        for _ in range(case.num_warmup):
            step()
        spans: list[Span] = []
        for layer in layers:
            layer.spans = spans
        ends_s = [perf_counter()]
        for _ in range(case.num_steps):
            step()
            ends_s.append(perf_counter())
        runs.append(ZeroRun(tuple(ends_s), tuple(spans)))
    return runs
