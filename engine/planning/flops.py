"""Floating-point operations: what a model needs per token, and what a device can do."""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist

from weft.engine.module import WeftModule

EFFICIENCY = 0.4
"""Share of its peak that a device is taken to reach before anything is measured."""
# Dense bf16 peak in FLOP/s, from the vendors' data sheets.
_PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "L40S": 362e12,
    "B200": 2250e12,
}


def model_flops_per_token(module: WeftModule, sequence_length: int, device: torch.device) -> float:
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


def peak_flops(device: torch.device) -> float:
    """FLOP/s of one device: its data sheet's on known GPUs, a short measurement elsewhere."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in _PEAKS.items():
            if part in name:
                return peak
    size, repeats = 512, 20
    a = torch.ones(size, size, device=device)
    best = 0.0
    for _ in range(repeats):
        start = perf_counter()
        float((a @ a)[0, 0])
        best = max(best, 2 * size**3 / (perf_counter() - start))
    return best
