"""torch's engines on emulated layers: plain collectives, DistributedDataParallel, and fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.emulated_stage import EmulatedLayer, emulated_hidden, emulated_loss
from benchmarks.peers.zero_case import ZeroCase, ZeroRun, time_computes
from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.primitives import PRIMITIVES
from weft.engine.distributed import init_distributed


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
