"""One step of DeepSpeed's own pipeline with clipping, on ranks of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CLIP, RATE = 0.01, 1.0


def clipped_step() -> dict[str, Any]:
    """Two stages of one linear layer each, ZeRO-0, fp32, SGD: norms of this stage's gradient and of its step."""
    import deepspeed

    from weft.engine.distributed import init_distributed

    init_distributed(60)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)]
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]
    alone = nn.Sequential(*layers)
    nn.functional.mse_loss(alone(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
    norms = [float(layer.weight.grad.norm()) for layer in layers]
    alone.zero_grad()
    module = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    before = [layer.weight.detach().clone() for layer in layers]
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        },
    )
    engine.train_batch(iter(data))
    held = next(module.parameters()).detach()
    stage = engine.stage_id
    return {"norms": norms, "step": float((held - before[stage]).norm())}
