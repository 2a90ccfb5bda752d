"""Memory and work of a teacher on the ranks that compute the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from weft.conf.schema import WeftConfig
from weft.engine.models.sizes import model_sizes
from weft.engine.stages.files.loading import quantization_of
from weft.engine.stages.teacher import load_teacher_config, teacher_model
from weft.pipeline.memory import WEIGHT_BYTES
from weft.pipeline.workload import CHUNK_WORKING, LOSS_BYTES, ModelWork

SCORE_BYTES = 12
"""Bytes of a likely token: its id, and its logarithm in fp32."""
ARRIVED_BYTES = 8
"""Bytes of a likely token that is attached to a micro-batch: its id and its logarithm, both in fp32."""
LAYER_WIDTHS = 12
"""Hidden states that a layer has at a time without gradients: three of an MLP that is four times as wide."""
LOSS_WORKING = 5
"""Bytes of the loss of a chunk of the student's logits, with its backward, per byte of the chunk in fp32."""


@dataclass(frozen=True)
class TeacherFacts:
    """A teacher on a rank with the last stage.

    Attributes:
        resident_bytes: bytes that stay on the device: its weights, or a step's scores if workers compute them.
        flops: operations of a micro-batch.
        saved_bytes: bytes of the scores of a micro-batch, which its backward needs.
        working_bytes: bytes that scoring needs besides, before the student's logits exist.
        in_line_bytes: bytes that scoring needs before a step for which workers' scores have not arrived.
        loss_bytes: bytes that the student's loss needs besides, beginning with its logits.
    """

    resident_bytes: float
    flops: float
    saved_bytes: float
    working_bytes: float
    loss_bytes: float
    in_line_bytes: float = 0.0


def teacher_facts(
    config: WeftConfig, words: int, device: str, trace: Callable[[WeftConfig, PreTrainedConfig], ModelWork | None]
) -> TeacherFacts:
    """Return the facts of a run's teacher.

    Args:
        words: number of the student's logits of a token.
        device: type of the ranks' devices.
        trace: returns the work of a sequence, or None if the forward does not run without data.

    Raises:
        ValueError: the teacher cannot be read.
    """
    hf_config, model = load_teacher_config(config), teacher_model(config)
    sizes, width = model_sizes(hf_config, quantized=quantization_of(model)), WEIGHT_BYTES[config.train.precision]
    rows, tokens = config.train.microbatch_size, config.train.microbatch_size * config.data.sequence_length
    most, likely = config.model.loss_chunk_mb * 1e6, min(config.distill.top_k or words, words)
    loss_bytes = float(width * tokens * words) + min(4.0 * tokens * words, most) * LOSS_WORKING
    working_bytes = min(4.0 * tokens * sizes.vocab_size, most) * CHUNK_WORKING[width]
    if config.inference.scores.enabled:
        parts = list(sizes.layers)
        parts[0] += sizes.before
        parts[-1] += sizes.after
        layer = max(part.stored(width) * width + part.scale_bytes for part in parts)
        count, hidden = max(1, config.pipeline.microbatches), float(width * tokens * sizes.hidden_size)
        buffers = 1 if device == "cpu" or len(parts) == 1 else 2
        return TeacherFacts(
            resident_bytes=float(ARRIVED_BYTES * count * tokens * likely),
            flops=0.0,
            saved_bytes=0.0,
            working_bytes=0.0,
            loss_bytes=loss_bytes,
            in_line_bytes=buffers * layer + count * hidden + max(working_bytes, LAYER_WIDTHS * hidden),
        )
    whole = sum(sizes.layers, sizes.before) + sizes.after
    whole = whole.without(sizes.tied)
    work = trace(config, hf_config)
    flops = 2.0 * tokens * whole.active if work is None else rows * work.whole.forward_flops
    return TeacherFacts(
        resident_bytes=whole.stored(width) * width + whole.scale_bytes,
        flops=flops,
        saved_bytes=float(SCORE_BYTES * tokens * likely),
        working_bytes=working_bytes,
        loss_bytes=loss_bytes,
    )


def distilled_work(work: ModelWork, width: int, members: int) -> ModelWork:
    """Return the work of a student, whose loss saves the gradient of whole logits, and multiplies it in a backward.

    Args:
        width: bytes of a logit.
        members: number of ranks that share a micro-batch, and all have its logits.
    """
    logits = work.after.logits
    saved = logits * (width * members - LOSS_BYTES)
    after = replace(
        work.after,
        activation_bytes=work.after.activation_bytes + saved,
        unrecomputed_bytes=work.after.unrecomputed_bytes + saved,
        working_bytes=logits * width * members,
    )
    return replace(work, after=after)
