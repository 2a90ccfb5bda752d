"""W accumulates into DeepSpeed's BF16_Optimizer as a plain backward does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft.engine.backward import SplitBackward

pytestmark = pytest.mark.usefixtures("one_rank")


def make(immediate):
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16()
    optimizer = BF16_Optimizer(
        torch.optim.AdamW(module.parameters()),
        param_names={p: n for n, p in module.named_parameters()},
        bfloat16_config=DeepSpeedBF16Config(enabled=True, immediate_grad_update=immediate),
        dp_process_group=dist.group.WORLD,
        grad_acc_dtype=torch.float32,
    )
    return module, optimizer


@pytest.mark.parametrize("immediate", [True, False])
def test_fp32_accumulation(immediate):
    batches = torch.randn(3, 5, 8, dtype=torch.bfloat16)
    module, optimizer = make(immediate)
    for x in batches:
        optimizer.clear_lp_grads()
        module(x).backward(torch.ones(5, 8, dtype=torch.bfloat16))
        optimizer.update_hp_grads()
    want = [g.clone() for g in optimizer.fp32_groups_gradients_flat]

    module, optimizer = make(immediate)
    split = SplitBackward(module)
    for x in batches:
        optimizer.clear_lp_grads()
        output, saved = split.forward(lambda x=x: module(x), None)
        split.input_backward(saved, torch.ones_like(output))
        optimizer.update_hp_grads()
        optimizer.clear_lp_grads()
        split.weight_backward(saved)
        optimizer.update_hp_grads()
    assert all(map(torch.equal, want, optimizer.fp32_groups_gradients_flat))
    assert want[0].abs().sum() > 0
    # With the hooks, a gradient is moved to fp32 as soon as it is there.
    assert all((p.grad is None) == immediate for p in module.parameters())
