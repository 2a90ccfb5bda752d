"""Ranks that start over gloo, and the operations that each performs on the job's store."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch.distributed as dist

from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.weft_engine import emulated_engine
from tests.comm.counted_store import CountedStore
from weft.comm.rendezvous import open_store
from weft.conf.schema import CommConfig, PipelineConfig, ScheduleKind, WeftConfig
from weft.engine.engine import WeftEngine

WORLD, ENGINE = "the world", "Weft's engine"
"""Parts of a start: torch's group of all ranks, and everything that a rank of Weft creates besides."""


@dataclass(frozen=True)
class Part:
    """The operations of one rank in a part of its start.

    Attributes:
        asked: operations of the store, by name.
        seconds: that it took, with waiting for others.
    """

    asked: dict[str, int]
    seconds: float

    @property
    def operations(self) -> int:
        return sum(self.asked.values())


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
    engines[0].destroy()
    return {WORLD: world, ENGINE: engine}


def _engine(stages: int, replicas: int, timeout_s: float) -> WeftEngine:
    """The smallest that has everything: a layer a stage, replicas that share the optimiser's state."""
    work = EmulatedWork(forward_s=0.0, input_s=0.0, weight_s=0.0, hidden_bytes=2**10, weight_elements=16)
    case = EngineCase(num_ranks=stages, num_layers=stages, num_microbatches=stages, num_replicas=replicas, work=work)
    pipeline = PipelineConfig(stages=stages, schedule=ScheduleKind["1f1b"], microbatches=stages)
    config = WeftConfig(pipeline=pipeline, comm=CommConfig(timeout_s=timeout_s))
    config.zero.stage = 1
    return emulated_engine(case, config)
