"""Plain collectives over the whole model, as torch.distributed does them: what a step without overlap moves."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.primitives import PRIMITIVES
from weft.engine.distributed import init_distributed
from weft.tools.benchmarks.peers.zero_case import ZeroCase


def run_plain(case: ZeroCase) -> dict[str, float]:
    """Seconds of an all-reduce, a reduce-scatter and an all-gather of all weights, layer by layer."""
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
