"""Weft's ZeRO on emulated layers."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedLayer
from benchmarks.peers.weft_engine import emulated_engine
from benchmarks.peers.zero_case import ZeroCase, ZeroRun, time_computes
from weft.conf.schema import DataConfig, OptimizerConfig, PipelineConfig, ScheduleKind, WeftConfig, ZeroConfig

NUM_RANKS = 4
"""The ranks of the bench: two nodes of two."""


def run(case: ZeroCase, stage: int, num_stages: int = 1) -> list[ZeroRun]:
    """Run one rank of ZeRO-``stage`` in ``num_stages`` pipeline stages, with a new plan for each amount of compute.

    A pipeline is interleaved: micro-batches are launched together, as the model tier determines.
    """
    return [_run(replace(case, compute_s=(compute_s,)), stage, num_stages) for compute_s in case.compute_s]


def _run(case: ZeroCase, stage: int, num_stages: int) -> ZeroRun:
    bucket, microbatches = case.layer_elements, case.num_microbatches * num_stages
    config = WeftConfig(
        pipeline=PipelineConfig(stages=num_stages, microbatches=microbatches),
        zero=ZeroConfig(stage=stage, reduce_bucket_size=bucket, allgather_bucket_size=bucket),
        optimizer=OptimizerConfig(clip=0.0),
        data=DataConfig(cache_dir=case.cache_dir),
    )
    config.comm.timeout_s = case.timeout_s
    if num_stages > 1:
        config.pipeline.schedule = ScheduleKind["interleaved"]
        config.pipeline.chunks_per_rank = min(8, case.num_layers // num_stages)
    engine = emulated_engine(
        EngineCase(
            num_ranks=num_stages,
            num_replicas=NUM_RANKS // num_stages,
            num_layers=case.num_layers,
            num_microbatches=microbatches,
            work=case.work(case.compute_s[0]),
        ),
        config,
    )
    layers = [layer for layer in engine.module.modules() if isinstance(layer, EmulatedLayer)]
    (found,) = time_computes(case, layers, engine.train_batch)
    engine.destroy()
    return found
