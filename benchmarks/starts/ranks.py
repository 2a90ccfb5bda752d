"""Ranks that start for real, and one among thousands that are emulated: what each asks of the store, and how long."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.weft_engine import emulated_engine
from benchmarks.starts.counted_store import CountedStore
from weft.comm.emulated.world import EmulatedWorld
from weft.comm.rendezvous import open_store
from weft.conf.schema import CommConfig, PipelineConfig, ScheduleKind, WeftConfig
from weft.engine.engine import WeftEngine

WORLD, ENGINE, DEEPSPEED = "the world", "Weft's engine", "DeepSpeed's grid"
"""Parts of a start: torch's group of all ranks, everything that a rank of Weft makes besides, and the groups of
DeepSpeed's own `PipelineParallelGrid` of the same ranks, which Weft does without."""


@dataclass(frozen=True)
class Part:
    """What one rank did in a part of its start.

    Attributes:
        asked: operations of the store, by name.
        seconds: that it took, with waiting for others.
    """

    asked: dict[str, int]
    seconds: float

    @property
    def operations(self) -> int:
        """All of them."""
        return sum(self.asked.values())


@dataclass(frozen=True)
class EmulatedStart:
    """A rank whose peers are all emulated.

    Attributes:
        seconds: until its engine stood.
        group_sizes: of the groups of more than one rank that it is in, the world first.
    """

    seconds: float
    group_sizes: tuple[int, ...]


def start_for_real(stages: int, replicas: int, timeout_s: float) -> dict[str, Part]:
    """One rank of a job that starts; what it does in each part."""
    timeout = timedelta(seconds=timeout_s)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = CountedStore(open_store(rank, size, timeout))

    def part(do: Callable[[], object]) -> Part:
        before, begun = store.asked.copy(), perf_counter()
        do()
        return Part(dict(store.asked - before), perf_counter() - begun)

    world = part(lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout))
    dist.barrier()
    engines: list[WeftEngine] = []
    engine = part(lambda: engines.append(_engine(stages, replicas, timeout_s)))
    dist.barrier()
    topology = PipeModelDataParallelTopology(num_pp=stages, num_dp=replicas, num_mp=1)
    deepspeed = part(lambda: PipelineParallelGrid(topology=topology))
    dist.barrier()
    engines[0].destroy()
    return {WORLD: world, ENGINE: engine, DEEPSPEED: deepspeed}


def start_among_emulated(stages: int, replicas: int, timeout_s: float) -> EmulatedStart:
    """Rank 0 of a job whose other ranks are emulated."""
    begun = perf_counter()
    world = EmulatedWorld(rank=0, size=stages * replicas, hosts=lambda rank: rank // 8)
    world.join()
    _engine(stages, replicas, timeout_s)
    seconds = perf_counter() - begun
    return EmulatedStart(seconds, tuple(size for size in world.group_sizes() if size > 1))


def _engine(stages: int, replicas: int, timeout_s: float) -> WeftEngine:
    """The smallest that has everything: a layer a stage, replicas that share the optimiser's state."""
    work = EmulatedWork(forward_s=0.0, input_s=0.0, weight_s=0.0, hidden_bytes=2**10, weight_elements=16)
    case = EngineCase(num_ranks=stages, num_layers=stages, num_microbatches=stages, num_replicas=replicas, work=work)
    pipeline = PipelineConfig(stages=stages, schedule=ScheduleKind["1f1b"], microbatches=stages)
    config = WeftConfig(pipeline=pipeline, comm=CommConfig(timeout_s=timeout_s))
    config.zero.stage = 1
    return emulated_engine(case, config)
