"""Cases: emulated work that every engine runs, and the measurements and timed steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import ClassVar

import torch.distributed as dist

from benchmarks.peers.emulated_stage import EmulatedLayer, EmulatedWork
from weft.pipeline.costs import CostModel, LinkCost, StageCost


@dataclass(frozen=True)
class StageProfile:
    """Measured costs of two stages, by number of layers; other stages are interpolated linearly.

    So the engine's cost per computation counts once per stage, and its cost per layer once per layer.
    """

    SECONDS: ClassVar = ("forward_s", "input_s", "weight_s", "step_s")
    few: tuple[int, StageCost]
    many: tuple[int, StageCost]

    def cost(self, num_layers: int) -> StageCost:
        """Return the cost of a virtual stage of ``num_layers`` layers."""
        (few, less), (many, more) = self.few, self.many
        share = (num_layers - few) / (many - few)

        def between(name: str) -> float:
            low, high = getattr(less, name), getattr(more, name)
            return max(0.0, low + (high - low) * share)

        return replace(less, **{name: between(name) for name in self.SECONDS})


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """Emulated layers on a few ranks of this machine."""

    num_ranks: int = 4
    """Pipeline ranks."""
    num_layers: int = 8
    """Layers of the whole model."""
    num_microbatches: int = 8
    """Micro-batches of one step."""
    work: EmulatedWork = field(default_factory=EmulatedWork)
    """Work of a layer."""
    link: LinkCost = field(default_factory=LinkCost)
    """Measured cost of a link between two ranks, for the simulation and for engines that plan."""
    num_replicas: int = 1
    """Number of pipelines, each of `num_ranks`."""
    sites: tuple[int, ...] = ()
    """Pipeline ranks per site; empty is one site."""
    profile: StageProfile | None = None
    """Measured costs of stages, for engines that plan; None uses `work`."""
    wan: LinkCost = field(default_factory=LinkCost)
    """Cost of a link between two ranks of different sites, over as many connections as saturate it."""
    in_a_row: bool = False
    """Measure steps that follow each other without a barrier, which would cross the WAN."""
    num_warmup: int = 3
    """Steps before the first that is measured."""
    num_steps: int = 5
    """Steps that are measured in one run."""

    def cost(self, num_layers: int) -> StageCost:
        """Return the cost of a virtual stage of ``num_layers`` layers, for engines that plan."""
        return self.work.cost(num_layers) if self.profile is None else self.profile.cost(num_layers)

    @property
    def name(self) -> str:
        """The case's size in a table."""
        mib = self.work.hidden_bytes / 2**20
        return f"{self.num_layers} layers, {self.num_microbatches} micro-batches, {mib:g} MiB"


@dataclass(frozen=True)
class RankRun:
    """The measurements of one rank.

    Attributes:
        step_s: seconds of each measured step, from barrier to barrier or in a row.
        cells: the rank's computations in the order of its schedule, as ``2F7`` or a pair.
    """

    step_s: tuple[float, ...]
    cells: tuple[str, ...]
    ended_s: float = 0.0
    """Time at which the last step ended, on the clock of `time.perf_counter`."""
    pipeline_s: float = 0.0
    """Seconds of the last step from its first action to its last on any rank, or 0 if not measured."""
    profile: CostModel | None = None
    """Costs fitted to the warm-up's steps, all but the first, or None if not measured."""


def middle_and_spread(step_s: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the range of the middle half divided by the median."""
    middle = median(step_s)
    if len(step_s) < 2:
        return middle, 0.0
    low, _, high = quantiles(step_s, n=4, method="inclusive")
    return middle, (high - low) / middle


def time_steps(case: EngineCase, step: Callable[[], object]) -> tuple[float, ...]:
    """Return the seconds of each measured step: from barrier to barrier, or between the ends of steps in a row."""
    dist.barrier()
    ends_s = [perf_counter()]
    for _ in range(case.num_warmup + case.num_steps):
        step()
        if not case.in_a_row:
            dist.barrier()
        ends_s.append(perf_counter())
    return tuple(after - before for before, after in pairwise(ends_s))[case.num_warmup :]


Span = tuple[str, float, float]
"""A computation (F, I, W), with its start and end by `perf_counter`."""


@dataclass(frozen=True, kw_only=True)
class ZeroCase:
    """A model of emulated layers, trained on a few ranks with one amount of compute after the other.

    Attributes:
        compute_s: seconds of a rank's forwards and backwards in a step, each tried in turn. A
            forward, an input gradient and a weight gradient take a third each.
        layer_elements: fp32 parameters of a layer.
        num_microbatches: micro-batches per step and rank, without a pipeline.
        num_warmup, num_steps: numbers of warm-up steps and of measured steps. Each value of ``compute_s`` takes both.
    """

    compute_s: tuple[float, ...]
    cache_dir: str
    num_layers: int = 8
    layer_elements: int = 1 << 17
    num_microbatches: int = 1
    num_warmup: int = 1
    num_steps: int = 3
    timeout_s: float = 120.0

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
        return tuple(after - before for before, after in pairwise(self.ends_s))


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
