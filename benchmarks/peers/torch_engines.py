"""torch.distributed.pipelining's schedules on emulated layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineSchedule

from benchmarks.peers.case import EngineCase, RankRun
from benchmarks.peers.emulated_stage import EmulatedLayer, emulated_hidden, emulated_loss, layers_per_stage
from benchmarks.peers.stepping import time_steps
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement

_KINDS: Mapping[str, tuple[type[_PipelineSchedule], str]] = MappingProxyType(
    {
        "gpipe": (pipelining.ScheduleGPipe, "d"),
        "1f1b": (pipelining.Schedule1F1B, "d"),
        "interleaved": (pipelining.ScheduleInterleaved1F1B, "dd"),
        "zbv": (pipelining.ScheduleZBVZeroBubble, "du"),
        "dualpipev": (pipelining.ScheduleDualPipeV, "du"),
    }
)
"""Schedule class and legs of the placement that it is made for."""


def run(case: EngineCase, timeout_s: float, kind: str) -> RankRun:
    """Run one rank of a schedule of torch.distributed.pipelining."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank, pipeline, replicas = _groups(case)
    make, legs = _KINDS[kind]
    placement = Placement((case.num_ranks,), legs, (case.num_ranks,))
    stages = [_stage(case, index, placement.num_stages, pipeline) for index in placement.rank_stages[rank]]
    single = len(legs) == 1
    schedule = make(stages[0] if single else stages, case.num_microbatches, loss_fn=emulated_loss)
    optimizer = torch.optim.Adam([p for stage in stages for p in stage.submod.parameters()], lr=1e-3)
    hidden = emulated_hidden(case.work).expand(case.num_microbatches, -1)

    def step() -> None:
        inputs = (hidden,) if any(stage.is_first for stage in stages) else ()
        schedule.step(*inputs, target=torch.zeros(case.num_microbatches) if any(s.is_last for s in stages) else None)
        if replicas is not None:
            for parameter in (p for stage in stages for p in stage.submod.parameters()):
                dist.all_reduce(parameter.grad, group=replicas)
        optimizer.step()
        optimizer.zero_grad()

    step_s = time_steps(case, step)
    if single:  # 1F1B's own description of itself is wrong on the last rank
        row = generate(kind, placement, case.num_microbatches).rows[rank]
        return RankRun(step_s, tuple(str(action) for (action,) in row))
    return RankRun(step_s, tuple(_cells(schedule.pipeline_order[rank])))


def _groups(case: EngineCase) -> tuple[int, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return this rank's index in its pipeline, the group of the pipeline, and the group of the stage's replicas."""
    count = case.num_replicas
    if count == 1:
        return dist.get_rank(), None, None
    rank, replica = divmod(dist.get_rank(), count)
    pipelines = [dist.new_group(range(r, count * case.num_ranks, count)) for r in range(count)]
    replicas = [dist.new_group(range(p * count, (p + 1) * count)) for p in range(case.num_ranks)]
    return rank, pipelines[replica], replicas[rank]


def _stage(
    case: EngineCase, index: int, num_stages: int, pipeline: dist.ProcessGroup | None
) -> pipelining.PipelineStage:
    layers = nn.Sequential(*(EmulatedLayer(case.work) for _ in range(layers_per_stage(case.num_layers, num_stages))))
    return pipelining.PipelineStage(layers, index, num_stages, torch.device("cpu"), group=pipeline)


def _cells(row: Sequence[object]) -> list[str]:
    return [str(action) for action in row if action is not None]
