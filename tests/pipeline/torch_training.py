"""Training a few tiny stages in torch's own pipeline runtime, on this rank of a gloo job."""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from weft.pipeline.serialization import schedule_from_csv


def train(texts):
    """The largest error of any of this rank's gradients against a sequential run, by schedule."""
    dist.init_process_group("gloo")
    return {name: gradient_error(text, num_microbatches, stages) for name, (text, num_microbatches, stages) in texts}


def gradient_error(text, num_microbatches, num_stages):
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(num_stages)]
    inputs, targets = torch.randn(num_microbatches, 4), torch.randn(num_microbatches, 4)
    loss_function = torch.nn.functional.mse_loss
    held = schedule_from_csv(text, name="ours").placement.rank_stages[rank]
    stages = [PipelineStage(whole[stage], stage, num_stages, torch.device("cpu")) for stage in held]
    runtime = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss_function)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        runtime._load_csv(file.name, format="compute_only")
    runtime.step(
        *([inputs] if 0 in held else []), **({"target": targets, "losses": []} if num_stages - 1 in held else {})
    )
    piped = {stage: [p.grad.clone() for p in whole[stage].parameters()] for stage in held}
    for module in whole:
        module.zero_grad()
    loss_function(torch.nn.Sequential(*whole)(inputs), targets).backward()
    return max(
        float((ours - parameter.grad).abs().max())
        for stage in held
        for ours, parameter in zip(piped[stage], whole[stage].parameters(), strict=True)
    )
