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
LOSS_WORKING = 5
"""Bytes of the loss of a chunk of the student's logits, with its backward, per byte of the chunk in fp32."""


@dataclass(frozen=True)
class TeacherFacts:
    """A teacher on a rank with the last stage.

    Attributes:
        weight_bytes: bytes of its weights.
        flops: operations of a micro-batch.
        saved_bytes: bytes of the scores of a micro-batch, which its backward needs.
        working_bytes: bytes that scoring needs besides, before the student's logits exist.
        loss_bytes: bytes that the student's loss needs besides, beginning with its logits.
    """

    weight_bytes: float
    flops: float
    saved_bytes: float
    working_bytes: float
    loss_bytes: float


def teacher_facts(
    config: WeftConfig, words: int, trace: Callable[[WeftConfig, PreTrainedConfig], ModelWork | None]
) -> TeacherFacts:
    """Return the facts of a run's teacher.

    Args:
        words: number of the student's logits of a token.
        trace: returns the work of a sequence, or None if the forward does not run without data.

    Raises:
        ValueError: the teacher cannot be read.
    """
    hf_config, model = load_teacher_config(config), teacher_model(config)
    sizes, width = model_sizes(hf_config, quantized=quantization_of(model)), WEIGHT_BYTES[config.train.precision]
    whole = sum(sizes.layers, sizes.before) + sizes.after
    whole = whole.without(sizes.tied)
    rows, tokens = config.train.microbatch_size, config.train.microbatch_size * config.data.sequence_length
    work = trace(config, hf_config)
    flops = 2.0 * tokens * whole.active if work is None else rows * work.whole.forward_flops
    most = config.model.loss_chunk_mb * 1e6
    return TeacherFacts(
        weight_bytes=whole.stored(width) * width + whole.scale_bytes,
        flops=flops,
        saved_bytes=float(SCORE_BYTES * tokens * min(config.distill.top_k or words, words)),
        working_bytes=min(4.0 * tokens * sizes.vocab_size, most) * CHUNK_WORKING[width],
        loss_bytes=float(width * tokens * words) + min(4.0 * tokens * words, most) * LOSS_WORKING,
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
