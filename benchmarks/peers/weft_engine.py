"""Weft's engine on emulated layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.peers.case import EngineCase, RankRun, ZeroCase, ZeroRun, time_computes, time_steps
from benchmarks.peers.emulated_stage import EmulatedLayer, EmulatedStage, EmulatedWork
from weft.conf.deepspeed import deepspeed_config
from weft.conf.schema import (
    CommConfig,
    DataConfig,
    OptimizerConfig,
    PipelineConfig,
    PlacementKind,
    ScheduleKind,
    WeftConfig,
    ZeroConfig,
)
from weft.engine.deepspeed.module import WeftModule
from weft.engine.distributed import device_bytes, from_rank_zero
from weft.engine.engine import WeftEngine
from weft.engine.initialize import PreparedRun
from weft.engine.layout import RankLayout
from weft.engine.models.sizes import ModelSizes, PartSize
from weft.engine.planning.facts import Facts, Links
from weft.engine.planning.joining import join
from weft.engine.planning.run_plan import settle_placement
from weft.pipeline.action import COMPUTE, slot_text
from weft.pipeline.placement import Placement
from weft.pipeline.profile import fit_costs


def run(
    case: EngineCase, timeout_s: float, kind: str, placement: str, comm: CommConfig | None = None, chunks: int = 0
) -> RankRun:
    """Run one rank of Weft's engine with a schedule of ``kind``.

    Args:
        comm: settings of the links between sites.
        chunks: maximum number of live activations of virtual stages per pipeline rank; 0 is no cap.
    """
    config = WeftConfig(
        pipeline=PipelineConfig(
            stages=case.num_ranks,
            schedule=ScheduleKind[kind],
            placement=PlacementKind[placement],
            microbatches=case.num_microbatches,
            memory_cap_bytes=chunks * case.num_ranks * case.work.hidden_bytes,
        )
    )
    config.comm = replace(comm or CommConfig(), timeout_s=timeout_s)
    config.optimizer.clip = 0.0  # as in the other engines
    engine = emulated_engine(case, config)
    time_steps(replace(case, num_warmup=0, num_steps=case.num_warmup), engine.train_batch)
    profile = fit_costs(engine.measured_timelines()[1:], engine.plan.costs)
    step_s, ended_s = time_steps(replace(case, num_warmup=0), engine.train_batch), perf_counter()
    row = engine.schedule.rows[engine.pipe_rank]
    cells = tuple(slot_text(slot) for slot in row if slot[0].op in COMPUTE)
    steps = [
        max(span.end_s for span in timeline.spans) - min(span.start_s for span in timeline.spans)
        for timeline in engine.measured_timelines()[-case.num_steps :]
    ]
    engine.destroy()
    return RankRun(step_s, cells, ended_s, median(steps), profile)


def set_speed(engine: WeftEngine, work: EmulatedWork, speed: float) -> None:
    """Make this rank's layers take their time divided by ``speed`` from now on."""
    slower = {name: getattr(work, name) / speed for name in ("forward_s", "input_s", "weight_s")}
    for stage in engine.module.stages.values():
        for layer in stage.layers:
            layer.work = replace(work, **slower)


def run_sharded(case: ZeroCase, stage: int, num_stages: int = 1) -> list[ZeroRun]:
    """Run one rank of ZeRO-``stage`` in ``num_stages`` pipeline stages, with a new plan for each amount of compute.

    A pipeline is interleaved: micro-batches are launched together, as the model tier determines.
    """
    return [_run_sharded(replace(case, compute_s=(compute_s,)), stage, num_stages) for compute_s in case.compute_s]


def _run_sharded(case: ZeroCase, stage: int, num_stages: int) -> ZeroRun:
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
            num_replicas=int(os.environ["WORLD_SIZE"]) // num_stages,
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


class Same:
    """Endless equal micro-batches, of which a replica may read any number. It is a `weft.engine.deal.Dealer`."""

    def __iter__(self) -> Same:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        ids = torch.zeros(1, 2, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    def deal(self, counts: Sequence[int]) -> None:
        """Change nothing, because all micro-batches are equal."""


def emulated_engine(case: EngineCase, config: WeftConfig) -> WeftEngine:
    """Return Weft's engine on the emulated layers of ``case``, with layout and schedule from ``config``."""
    device = join(config)
    facts = _facts(case, config, device)
    placement = from_rank_zero(lambda: settle_placement(config, facts), Placement)
    opened = PreparedRun.open(config, facts, placement, device)
    held = placement.rank_stages[facts.layout.position(dist.get_rank()).stage]
    stages = [EmulatedStage(case.work, index=index, layers=opened.plan.split.layers) for index in held]
    module = WeftModule(stages, placement, facts.layout)
    engine = opened.engine(
        config,
        deepspeed_config(config, dist.get_world_size()),
        module,
        args=None,
        optimizer=None,
        model_parameters=list(module.parameters()),
        training_data=None,
        lr_scheduler=None,
        collate_fn=None,
    )
    engine.set_dataiterator(Same())
    return engine


@dataclass(frozen=True)
class LayersJob:
    """A job of layers, compared with the same job without emulation; see
    `weft.recipes.emulation.job.EmulatedJob`."""

    case: EngineCase
    config: WeftConfig

    def engine(self) -> WeftEngine:
        """Create the engine, as benchmarks do."""
        return emulated_engine(self.case, self.config)


def _facts(case: EngineCase, config: WeftConfig, device: torch.device) -> Facts:
    """Return the facts of emulated layers, except the costs of their collectives."""
    layer = PartSize(case.work.weight_elements, case.work.weight_elements)
    sites = range(len(case.sites))
    if layers := config.pipeline.layers:
        costs = {len(layers): tuple(map(case.cost, layers))}
    else:
        costs = {
            count: (case.cost(case.num_layers // count),) * count
            for count in range(case.num_ranks, case.num_layers + 1, case.num_ranks)
            if not case.num_layers % count
        }
    return Facts(
        layout=RankLayout(case.sites or (case.num_ranks,), case.num_replicas),
        model=ModelSizes(
            before=PartSize(0, 0),
            layers=(layer,) * case.num_layers,
            after=PartSize(0, 0),
            hidden_size=case.work.hidden_bytes // 4,
            vocab_size=1,
        ),
        flops_per_s=None,
        device_bytes=device_bytes(device, dist.get_world_size()),
        stage_costs=costs,
        links=Links(case.link, case.wan, tuple(((a, b), case.wan) for a in sites for b in sites if a != b)),
        replica_nodes=(0,) * case.num_replicas,
        sources=dict.fromkeys(("layout", "model", "stage_costs", "links"), "given by the emulated case"),
    )
