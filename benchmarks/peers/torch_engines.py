"""torch's engines on emulated layers: pipelining's schedules, DistributedDataParallel, fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.case import EngineCase, RankRun, ZeroCase, ZeroRun, time_computes, time_steps
from benchmarks.peers.emulated_stage import EmulatedLayer, emulated_hidden, emulated_loss, layers_per_stage
from weft.comm import rendezvous
from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.primitives import PRIMITIVES
from weft.engine.distributed import init_distributed
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
    rendezvous.register()  # torch's own would listen on every address
    dist.init_process_group("gloo", init_method=rendezvous.METHOD, timeout=timedelta(seconds=timeout_s))
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


def run_plain(case: ZeroCase) -> dict[str, float]:
    """Return the seconds of an all-reduce, a reduce-scatter and an all-gather of all weights, layer by layer."""
    init_distributed(case.timeout_s)
    world = dist.group.WORLD
    assert world is not None, "init_distributed has made it"
    whole = torch.zeros(dist.get_world_size(), case.layer_elements // dist.get_world_size())
    inputs = {Primitive.all_reduce: whole, Primitive.reduce_scatter: whole, Primitive.all_gather: whole[0].clone()}
    found = {}
    for primitive, tensor in inputs.items():
        seconds = []
        for _ in range(1 + case.num_steps):
            dist.barrier()
            start = perf_counter()
            for _ in range(case.num_layers):
                PRIMITIVES[primitive](tensor, world)
            seconds.append(perf_counter() - start)
        found[primitive.value] = median(seconds[1:])
    return found


def run_ddp(case: ZeroCase) -> list[ZeroRun]:
    """Run one rank of DDP, with buckets of one layer."""
    init_distributed(case.timeout_s)
    work = case.work(case.compute_s[0])
    layers = [EmulatedLayer(work) for _ in range(case.num_layers)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4 * case.layer_elements / 2**20)

    def micro_batch(last: bool) -> None:
        with nullcontext() if last else model.no_sync():
            emulated_loss(model(emulated_hidden(work))).backward()

    return time_computes(case, layers, _training(case, model, micro_batch))


def run_fsdp2(case: ZeroCase) -> list[ZeroRun]:
    """Run one rank of FSDP2, layer by layer, with gradients reduced once per step."""
    init_distributed(case.timeout_s)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    work = case.work(case.compute_s[0])
    layers = [_ShardableLayer(work) for _ in range(case.num_layers)]
    model: Any = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def micro_batch(last: bool) -> None:
        model.set_requires_gradient_sync(last)
        emulated_loss(model(emulated_hidden(work))).backward()

    return time_computes(case, layers, _training(case, model, micro_batch))


def _training(case: ZeroCase, model: nn.Module, micro_batch: Callable[[bool], None]) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        for number in range(case.num_microbatches):
            micro_batch(number == case.num_microbatches - 1)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _ShardableLayer(EmulatedLayer):
    """A layer that spends the weight gradient's time in its graph, because fully_shard drops hooks on parameters."""

    def product(self) -> Tensor:
        return F.linear(self.one, _WeightTimed.apply(self.linear.weight, self))


class _WeightTimed(torch.autograd.Function):
    """Identity; the backward takes the weight gradient's time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.layer = layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.spend("W")
        return gradient, None
