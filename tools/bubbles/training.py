"""The training side: ranks that step until they are told to stop, and say when each step was."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist

from weft.conf import load
from weft.conf.schema import PipelineConfig, WeftConfig
from weft.engine.emulation import EmulatedWork
from weft.engine.engine import WeftEngine
from weft.pipeline.action import COMPUTE, Op
from weft.tools.peers.case import Case

WORK = EmulatedWork(forward_s=0.02, input_s=0.02, weight_s=0.02, hidden_bytes=2**18)
STEPS_DRAWN = 256
"""Steps whose computations are kept."""
VOCABULARY = 4096
"""Of the real model's random tokens."""


@dataclass(frozen=True)
class Cell:
    """One computation of a rank; seconds of CLOCK_MONOTONIC."""

    op: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RankLog:
    """What a rank did.

    Attributes:
        steps_s: begin and end of each step.
        cells: computations of the last steps, in order.
    """

    steps_s: tuple[tuple[float, float], ...]
    cells: tuple[Cell, ...]


def settings(name: str, *, ranks: int, microbatches: int) -> WeftConfig:
    """Emulated layers on ``ranks`` ranks, with their bubbles published."""
    config = WeftConfig(pipeline=PipelineConfig(stages=ranks, microbatches=microbatches))
    config.train.name, config.cluster.ranks = name, ranks
    config.inference.enabled = True
    return config


def train(config: WeftConfig, real: bool, stop: str, cores: tuple[int, ...]) -> RankLog:
    """One rank, until a file named ``stop`` is there.

    Args:
        real: train the quickstart's model instead of emulated layers.
        cores: cores that the rank may use; empty is all.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    engine = _real(config) if real else _emulated(config)
    steps, cells = [], deque[list[Cell]](maxlen=STEPS_DRAWN)
    ended = torch.zeros(1)
    while not ended.item():
        begin_s = time.monotonic()
        engine.train_batch()
        steps.append((begin_s, time.monotonic()))
        cells.append(_cells(engine))
        if len(steps) % 8 == 0:
            ended[0] = float(Path(stop).exists())
            dist.all_reduce(ended)
    engine.destroy()
    return RankLog(tuple(steps), tuple(cell for step in cells for cell in step))


def _cells(engine: WeftEngine) -> list[Cell]:
    """Of the last step."""
    clock = engine._clock  # the host's, which is CLOCK_MONOTONIC on Linux
    return [
        Cell(mark.slot[0].op.value, clock.seconds(0.0, mark.start), clock.seconds(0.0, mark.end))
        for mark in engine._records[-1].marks
        if mark.slot[0].op in COMPUTE | {Op.STEP}
    ]


def _emulated(config: WeftConfig) -> WeftEngine:
    from weft.tools.peers.weft_engine import emulated_engine

    case = Case(num_ranks=config.pipeline.stages, num_layers=config.pipeline.stages, work=WORK)
    engine = emulated_engine(case, config)
    ids = torch.zeros(1, 2, dtype=torch.long)
    engine.set_dataiterator(repeat({"input_ids": ids, "labels": ids}))
    return engine


def _real(config: WeftConfig) -> WeftEngine:
    from weft.engine.initialize import initialize

    quick = load(["recipe=quickstart", f"train.name={config.train.name}", "inference.enabled=true"])
    quick.inference, quick.model.self_check = config.inference, False
    quick.model.overrides.setdefault("vocab_size", VOCABULARY)
    engine, *_ = initialize(config=quick)
    generator = torch.Generator().manual_seed(0)
    size = (quick.train.microbatch_size, quick.data.sequence_length)
    ids = torch.randint(VOCABULARY, size, generator=generator)
    engine.set_dataiterator(repeat({"input_ids": ids, "labels": ids}))
    return engine
