"""The training side: ranks that train until a stop file appears, and record the time of each step."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.adapting.disturbance import real_time
from benchmarks.memory import VOCABULARY, random_batches
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from weft.conf import load
from weft.conf.schema import ScheduleKind, WeftConfig
from weft.conf.sites import ranks_per_site
from weft.engine.engine import WeftEngine
from weft.inference.board.common_bubbles import Spans
from weft.pipeline.costs import LinkCost

WORK = EmulatedWork(forward_s=0.02, input_s=0.02, weight_s=0.02, hidden_bytes=2**18)


@dataclass(frozen=True)
class Training:
    """The settings of the ranks.

    Attributes:
        real: train the quickstart's model instead of emulated layers.
        folder: receives rank 0's step times; a file named ``stop`` there ends the run.
        cores: cores that the ranks may use; empty is all.
        shape: settings of the real model, besides those of the quickstart.
    """

    config: WeftConfig
    real: bool
    folder: Path
    cores: tuple[int, ...]
    shape: tuple[str, ...] = ()

    @property
    def stop(self) -> Path:
        """The file whose creation ends the run."""
        return self.folder / "stop"

    @property
    def steps_file(self) -> Path:
        """The file with a line for each step of rank 0: its begin and end."""
        return self.folder / "steps"

    def steps_s(self) -> Spans:
        """Begin and end of each step so far."""
        return [(float(begin), float(end)) for begin, end in map(str.split, self.steps_file.read_text().splitlines())]


def cores_apart() -> tuple[tuple[int, ...], list[int]]:
    """Return a core of training's own, and those of the servers. A single core is the servers', too."""
    cores = sorted(os.sched_getaffinity(0))
    return (tuple(cores[:1]), cores[1:]) if len(cores) > 1 else ((), cores)


def settings(name: str, *, ranks: int, microbatches: int, schedule: str, sites: Sequence[str] = ()) -> WeftConfig:
    """Return a pipeline that publishes its bubbles.

    Args:
        sites: settings of two sites. Empty: all ranks are on one site.
    """
    given = sites
    config = load([*given, f"cluster.ranks={ranks}", f"pipeline.stages={ranks}"])
    config.train.name, config.pipeline.schedule = name, ScheduleKind[schedule]
    config.pipeline.microbatches = microbatches
    config.inference.enabled = True
    return config


def train(training: Training) -> None:
    """Train one rank until the stop file appears. On cores of their own, ranks run before all other programs."""
    if training.cores:
        os.sched_setaffinity(0, training.cores)
    with real_time() if training.cores else nullcontext():
        _train(training, _real(training) if training.real else _emulated(training.config))


def _train(training: Training, engine: WeftEngine) -> None:
    ended, count = torch.zeros(1), 0
    with open(training.steps_file if dist.get_rank() == 0 else os.devnull, "w", buffering=1) as steps:
        while not ended.item():
            begin_s = time.monotonic()
            engine.train_batch()
            steps.write(f"{begin_s} {time.monotonic()}\n")
            count += 1
            if count % 8 == 0:
                ended[0] = float(training.stop.exists())
                dist.all_reduce(ended)
    engine.destroy()


def _emulated(config: WeftConfig) -> WeftEngine:
    from benchmarks.peers.weft_engine import emulated_engine

    links = [
        LinkCost(latency_s=link.latency_ms / 1e3, bandwidth_bps=link.bandwidth_mbps * 1e6)
        for link in config.cluster.links
    ]
    case = EngineCase(
        num_ranks=config.pipeline.stages,
        num_layers=config.pipeline.stages,
        work=WORK,
        sites=ranks_per_site(config),
        wan=links[0] if links else LinkCost(),
    )
    return emulated_engine(case, config)


def _real(training: Training) -> WeftEngine:
    from weft.engine.initialize import initialize

    config = training.config
    stages = f"pipeline.stages={config.pipeline.stages}"
    quick = load(["recipe=quickstart", f"train.name={config.train.name}", stages, *training.shape])
    quick.inference, quick.cluster, quick.model.self_check = config.inference, config.cluster, False
    quick.pipeline.schedule = config.pipeline.schedule
    quick.model.overrides.setdefault("vocab_size", VOCABULARY)
    engine, *_ = initialize(config=quick)
    engine.set_dataiterator(repeat(next(random_batches(quick))))
    return engine
