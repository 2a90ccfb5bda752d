"""Usage of the devices by a run: computation and memory, over all ranks."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule


@dataclass(frozen=True)
class Usage:
    """The usage of all ranks.

    Attributes:
        bubble_share: share of the last step in which ranks did not compute, on average.
        peak_bytes: highest memory of a rank so far: of tensors on its GPU, or the process's resident memory.
    """

    bubble_share: float
    peak_bytes: int


def gather_usage(idle_share: float, device: torch.device) -> Usage:
    """Collect the usage of all ranks. Collective call.

    Args:
        idle_share: share of the last step in which this rank did not compute.
    """
    found = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64, device=device)
    found[dist.get_rank()] = torch.tensor([idle_share, _peak_bytes(device)], dtype=torch.float64)
    dist.all_reduce(found)  # each row has values of one rank: a sum's connections exist already, on all backends
    shares, peaks = found.cpu().unbind(1)
    return Usage(float(shares.mean()), int(peaks.max()))


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def model_flops_per_token(module: PipelineModule, sequence_length: int, device: torch.device) -> float:
    """Return the FLOP per trained token: 6 per weight, plus attention's 12 x layers x width x context / 2.

    Collective call over the pipeline. Recomputation does not count, so utilisation with it is
    *model* FLOPs utilisation (MFU), as MegaScale reports it (section 6.1).
    """
    counts = torch.tensor(
        sum(p.numel() for name, p in module.named_global_parameters() if "embed" not in name), dtype=torch.int64
    ).to(device)
    dist.all_reduce(counts, group=module._grid.get_model_parallel_group())
    config = next(iter(module.stages.values())).model.config.get_text_config()
    attention = 6.0 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6.0 * int(counts) + attention
