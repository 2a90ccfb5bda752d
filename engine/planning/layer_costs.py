"""Measured costs of layers on this machine: a stage of one layer of each kind, timed at its real shapes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from weft.conf.schema import ChunkedLoss, WeftConfig
from weft.engine.backward import SplitBackward
from weft.engine.precision import DTYPES
from weft.engine.stages.cutting.split import StageSplit
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.loading import load_stages
from weft.pipeline.costs import StageCost
from weft.pipeline.workload import ModelWork

Result = TypeVar("Result")
_WARM, _LEAST, _MOST = 2, 3, 30
"""Micro-batches before those that are timed, and of these."""


def measured_layers(work: ModelWork) -> tuple[int, ...]:
    """Return the layers that represent all others: the first, the last, and one of each kind between them."""
    last = len(work.layers) - 1
    kinds = {work.layers[layer]: layer for layer in range(last - 1, 0, -1)}
    return tuple(sorted({0, last, *kinds.values()}))


def measure_layers(
    config: WeftConfig, hf_config: PreTrainedConfig, work: ModelWork, device: torch.device, *, seconds: float
) -> tuple[StageCost, ...]:
    """Measure the costs of each layer for one micro-batch.

    The first layer includes the embedding, and the last layer the head and the loss. Only layers that are timed are
    allocated, with the configured model's weights or random ones.

    Args:
        work: the model's work, whose equal layers are timed once.
        seconds: time limit for all measurements together, without the time to load weights.

    Raises:
        ValueError: the model cannot be read, or cannot be cut into single layers.
    """
    wanted = measured_layers(work)
    split = StageSplit((1,) * len(work.layers))
    found: dict[int, StageCost] = {}
    for layer in wanted:
        (stage,) = load_stages(
            config.model, split, [layer], dtype=DTYPES[config.train.precision], seed=config.train.seed
        )
        stage.to(device)
        if stage.is_last and config.model.chunked_loss is ChunkedLoss.always:
            stage.compute_loss_in_chunks(config.model.loss_chunk_mb * 1e6)
        found[layer] = _measure(stage, config, hf_config, device, seconds / len(wanted))
        del stage
    last = len(work.layers) - 1
    standing = {work.layers[layer]: found[layer] for layer in wanted if 0 < layer < last}
    return tuple(found[layer] if layer in (0, last) else standing[work.layers[layer]] for layer in range(last + 1))


def _measure(
    stage: Stage, config: WeftConfig, hf_config: PreTrainedConfig, device: torch.device, seconds: float
) -> StageCost:
    """Return the median seconds of forward, input gradient and weight gradient, each until the device has finished."""
    size = config.train.microbatch_size, config.data.sequence_length
    ids = torch.randint(hf_config.get_text_config().vocab_size, size, device=device)
    batch = {"input_ids": ids, "labels": ids}
    num_items = torch.tensor(float(ids.numel()), device=device)
    backward = SplitBackward(stage)
    shape, dtype = stage.hidden_spec(batch)
    times: list[tuple[float, float, float]] = []
    began = perf_counter()
    while len(times) < _WARM + _LEAST or (perf_counter() - began < seconds and len(times) < _MOST):
        hidden = None
        if stage.index:
            hidden = torch.randn(shape, device=device).to(dtype).requires_grad_()

        def run(hidden: Tensor | None = hidden) -> Tensor:
            return stage(hidden, batch, num_items)

        forward_s, (output, saved) = _timed(device, lambda: backward.forward(run, hidden))  # noqa: B023
        saved_bytes = saved.activation_bytes
        output_bytes = 0 if stage.is_last else output.nbytes
        gradient = torch.ones_like(output)
        del output
        input_s, _ = _timed(device, lambda: backward.input_backward(saved, gradient))  # noqa: B023
        kept_bytes = saved.kept_bytes
        weight_s, _ = _timed(device, lambda: backward.weight_backward(saved))  # noqa: B023
        times.append((forward_s, input_s, weight_s))
    forward_s, input_s, weight_s = (median(column) for column in zip(*times[_WARM:], strict=True))
    return StageCost(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        activation_bytes=saved_bytes,
        weight_saved_bytes=kept_bytes,
        output_bytes=output_bytes,
        step_s=_optimizer_s(stage, device),
    )


def _optimizer_s(stage: Stage, device: torch.device) -> float:
    """Return the seconds of an AdamW step of the stage's weights in fp32, on a rank without replicas."""
    weights = [torch.zeros(p.shape, device=device) for p in stage.parameters() if p.requires_grad]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=device.type == "cuda")
    return median(_timed(device, optimizer.step)[0] for _ in range(_WARM + _LEAST))


def _timed(device: torch.device, run: Callable[[], Result]) -> tuple[float, Result]:
    started = perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - started, result
