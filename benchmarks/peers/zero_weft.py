"""Weft's ZeRO on emulated layers."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedLayer
from benchmarks.peers.weft_engine import emulated_engine
from benchmarks.peers.zero_case import Technique, ZeroCase, ZeroRun, time_computes
from weft.conf.host.files import write_atomic
from weft.conf.schema import (
    DataConfig,
    OptimizerConfig,
    PipelineConfig,
    ScheduleKind,
    WeftConfig,
    ZeroConfig,
)
from weft.pipeline.generators import generate
from weft.pipeline.lowering import split_backwards
from weft.pipeline.placement import Placement
from weft.pipeline.serialization import schedule_to_json

NUM_RANKS = 4
"""The ranks of the bench: two nodes of two."""


def run(case: ZeroCase, technique: Technique) -> list[ZeroRun]:
    """Run one rank of Weft, with a new plan for each amount of compute."""
    return [_run(replace(case, compute_s=(compute_s,)), technique) for compute_s in case.compute_s]


def _run(case: ZeroCase, technique: Technique) -> ZeroRun:
    with tempfile.TemporaryDirectory(prefix="weft-zero-") as folder:
        config = _config(case, technique, Path(folder))
        engine = emulated_engine(
            EngineCase(
                num_ranks=technique.num_stages,
                num_replicas=NUM_RANKS // technique.num_stages,
                num_layers=case.num_layers,
                num_microbatches=config.pipeline.microbatches,
                work=case.work(case.compute_s[0]),
            ),
            config,
        )
    layers = [layer for layer in engine.module.modules() if isinstance(layer, EmulatedLayer)]
    (found,) = time_computes(case, layers, engine.train_batch)
    engine.destroy()
    return found


def _config(case: ZeroCase, technique: Technique, folder: Path) -> WeftConfig:
    bucket = case.layer_elements if technique.layer_by_layer else case.num_elements
    microbatches = case.num_microbatches * technique.num_stages
    config = WeftConfig(
        pipeline=PipelineConfig(stages=technique.num_stages, microbatches=microbatches),
        zero=ZeroConfig(
            stage=technique.zero_stage,
            reduce_bucket_size=bucket,
            allgather_bucket_size=bucket,
            partition=technique.partition,
        ),
        optimizer=OptimizerConfig(clip=0.0),
        data=DataConfig(cache_dir=case.cache_dir),
    )
    config.comm.timeout_s = case.timeout_s
    if technique.chunks > 1:
        config.pipeline.schedule = ScheduleKind["interleaved"]
        config.pipeline.chunks_per_rank = min(technique.chunks, case.num_layers // technique.num_stages)
    if not technique.weights_first:
        config.pipeline.schedule = ScheduleKind["file"]
        config.pipeline.schedule_file = str(folder / "schedule.json")
        schedule = generate("1f1b", Placement.straight(technique.num_stages), microbatches)
        halved = split_backwards(schedule, range(technique.num_stages))
        write_atomic(Path(config.pipeline.schedule_file), schedule_to_json(halved))
    return config
