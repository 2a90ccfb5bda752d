"""Weft's engine on emulated layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from statistics import median
from time import perf_counter

import deepspeed
import torch
import torch.distributed as dist

from weft.conf.deepspeed import deepspeed_config
from weft.conf.schema import CommConfig, Partition, PipelineConfig, PlacementKind, ScheduleKind, WeftConfig
from weft.engine.distributed import device_bytes, from_rank_zero, init_distributed
from weft.engine.emulation.stage import EmulatedStage
from weft.engine.engine import WeftEngine
from weft.engine.module import WeftModule
from weft.engine.planning.crossings import Seat, open_wan
from weft.engine.planning.overlap import OverlapPlan, ZeroWork, plan_overlap
from weft.engine.planning.schedules import plan_cells, plan_placement
from weft.engine.zero import Collectives
from weft.pipeline.action import COMPUTE, slot_text
from weft.pipeline.costs import CostModel
from weft.pipeline.fitting import fit_costs
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.tools.benchmarks.peers.case import Case, RankRun
from weft.tools.benchmarks.peers.stepping import time_steps


def run(
    case: Case, timeout_s: float, kind: str, placement: str, comm: CommConfig | None = None, chunks: int = 0
) -> RankRun:
    """One rank of Weft's engine with a schedule of ``kind``.

    Args:
        comm: how sites are joined.
        chunks: most live activations of virtual stages, for each pipeline rank; 0 is no cap.
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
    ids = torch.zeros(1, 2, dtype=torch.long)
    engine.set_dataiterator(repeat({"input_ids": ids, "labels": ids}))
    time_steps(replace(case, num_warmup=0, num_steps=case.num_warmup), engine.train_batch)
    profile = fit_costs(engine.measured_timelines()[1:], engine.costs)
    step_s, ended_s = time_steps(replace(case, num_warmup=0), engine.train_batch), perf_counter()
    row = engine.schedule.rows[engine.pipe_rank]
    cells = tuple(slot_text(slot) for slot in row if slot[0].op in COMPUTE)
    steps = [
        max(span.end_s for span in timeline.spans) - min(span.start_s for span in timeline.spans)
        for timeline in engine.measured_timelines()[-case.num_steps :]
    ]
    engine.destroy()
    return RankRun(step_s, cells, ended_s, median(steps), profile)


def emulated_engine(case: Case, config: WeftConfig) -> WeftEngine:
    """Weft's engine on the emulated layers of ``case``, laid out and scheduled as ``config`` says."""
    device = init_distributed(config.comm.timeout_s)

    def costs_of(placement: Placement) -> CostModel:
        return case.work.costs(case.num_layers, placement.num_stages, local=case.link, wan=case.wan)

    layout = plan_placement(config.pipeline, case.sites, costs_of=costs_of)
    costs = costs_of(layout)
    pipe_rank, replica = divmod(dist.get_rank(), case.num_replicas)
    stages = [
        EmulatedStage(case.work, index=index, num_layers=case.num_layers, num_stages=layout.num_stages)
        for index in layout.rank_stages[pipe_rank]
    ]
    wan = open_wan(layout, config.comm, device)
    sizes = [seat.pipelines for seat in Seat.all(layout, case.num_replicas, config.comm.cell)]
    module = WeftModule(stages, layout)
    settings = deepspeed_config(config, dist.get_world_size())
    collectives = Collectives.open(config, layout.num_ranks, device)
    overlap = from_rank_zero(lambda: _plan_overlap(case, config, layout, costs, collectives), OverlapPlan)
    schedules = from_rank_zero(
        lambda: plan_cells(config.pipeline, layout, sizes, costs=costs, zero_stage=config.zero.stage, overlap=overlap),
        Schedule,
    )
    return WeftEngine(
        weft=config,
        schedule=schedules[sizes[replica]],
        costs=costs,
        collectives=collectives,
        overlap=overlap,
        wan=wan,
        args=None,
        model=module,
        optimizer=None,
        model_parameters=list(module.parameters()),
        training_data=None,
        lr_scheduler=None,
        mpu=module.mpu(),
        collate_fn=None,
        config=settings,
        config_class=deepspeed.DeepSpeedConfig(settings, module.mpu()),
    )


def _plan_overlap(
    case: Case, config: WeftConfig, layout: Placement, costs: CostModel, collectives: Collectives
) -> OverlapPlan | None:
    """As `weft.initialize` plans, with costs that are known."""
    if collectives.costs is None or config.zero.partition is not Partition.workload:
        return None
    each = case.num_layers // layout.num_stages * case.work.weight_elements
    work = ZeroWork.of(
        config,
        collectives.group,
        collectives.costs,
        (each,) * layout.num_stages,
        stages=costs,
        placement=layout,
        largest_block=case.work.weight_elements,
        available=device_bytes(torch.device("cpu"), dist.get_world_size()),
    )
    return plan_overlap(work, costs, layout, case.num_microbatches)
