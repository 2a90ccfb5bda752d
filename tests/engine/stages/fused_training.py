"""Train tiny models in two stages with split backwards, plain and with fused kernels, and print the losses as JSON.

A process of its own, because Triton decides at its import whether it interprets kernels.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.engine.backward.test_stages import train_in_stages
from tests.engine.stages.tiny import batch, gradients, stages_of, tiny
from weft.engine.models.batch import count_label_tokens
from weft.engine.models.kernels import fuse
from weft.engine.stages.checking.comparison import distance

STEPS, LENGTH = 20, 3
CPU = torch.device("cpu")


def trained(arch: str, dtype: torch.dtype, *, fused: bool) -> dict[str, Any]:
    """Train for `STEPS` steps in two stages, and return the losses, first gradients and numbers of kernels.

    Masters are fp32, as in training.
    """
    stages = stages_of(tiny(arch, **{"n_layer" if arch == "gpt2" else "num_hidden_layers": 2}), 2, dtype=dtype)
    kinds = [dict(fuse(stage.hf_model, CPU)) if fused else {} for stage in stages]
    weights = list({parameter: None for stage in stages for _, parameter in stage.named_global_parameters()})
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    losses: list[float] = []
    stages[-1].register_forward_hook(lambda module, arguments, loss: losses.append(float(loss.detach())))
    first: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        data = batch(1, LENGTH, seed=step % 4)
        data["labels"] = data["input_ids"].clone()
        train_in_stages(stages, [data], count_label_tokens(data))
        first = first or {name: gradient.float().clone() for name, gradient in gradients(stages).items()}
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
    return {"losses": losses, "gradients": first, "kernels": kinds}


def main(archs: list[str]) -> None:
    """Print one line of JSON for each architecture and number format."""
    for arch in archs:
        for dtype in (torch.float32, torch.bfloat16):
            plain, fused = (trained(arch, dtype, fused=fused) for fused in (False, True))
            off = {name: distance(fused["gradients"][name], gradient) for name, gradient in plain["gradients"].items()}
            row = {"arch": arch, "dtype": str(dtype).removeprefix("torch."), "kernels": fused["kernels"]}
            row |= {"plain": plain["losses"], "fused": fused["losses"], "gradients": off}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
