"""Model FLOPs per token, without recomputation, from which utilisation is computed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule


def model_flops_per_token(module: PipelineModule, sequence_length: int, device: torch.device) -> float:
    """FLOP per trained token: 6 per weight, plus attention's 12 x layers x width x context / 2.

    A collective call over the pipeline. Recomputation does not count, so utilisation with it is
    *model* FLOPs utilisation (MFU), as MegaScale reports it (section 6.1).
    """
    counts = torch.tensor(
        sum(p.numel() for name, p in module.named_global_parameters() if "embed" not in name), dtype=torch.int64
    ).to(device)
    dist.all_reduce(counts, group=module._grid.get_model_parallel_group())
    config = next(iter(module.stages.values())).model.config.get_text_config()
    attention = 6.0 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6.0 * int(counts) + attention
