"""DeepSpeed's method `eval_batch`, over forwards of the executor."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from weft.engine.execution.batches import draw
from weft.engine.execution.step_state import StepState
from weft.engine.planning.schedules import plan_evaluation


def eval_batch(
    engine: PipelineEngine,
    data_iter: Iterator,
    return_logits: bool = False,
    compute_loss: bool = True,
    reduce_output: str | None = "avg",
    bcast_loss: bool = True,
    num_micro_batches: int | None = None,
) -> Tensor | tuple[Tensor | None, list[Tensor]] | None:
    """Evaluate the next micro-batches without training on them. Collective call.

    Args:
        data_iter: micro-batches, on every rank.
        return_logits: also return each micro-batch's logits [B, S, V], on the ranks that
            hold the last stage (an empty list elsewhere).
        compute_loss: average the loss over tokens and return it, or None otherwise.
        reduce_output, bcast_loss: accepted for compatibility. The loss is always averaged over tokens and
            replicas, and returned on every rank.
        num_micro_batches: number to read. None means as in training.
    """
    engine.module.eval()
    schedule = plan_evaluation(
        engine.schedule.placement, num_micro_batches or engine.micro_batches, zero_stage=engine.weft.zero.stage
    )
    batches = draw(data_iter, schedule.num_microbatches, engine.prepare, what="eval_batch")
    state = StepState(
        batches=batches,
        training=False,
        keep_logits=return_logits,
        **(engine.step_loss.count(batches) if compute_loss else {"num_items": None}),
    )
    with engine.neighbours.watching():
        engine.executor.run(schedule, state)
        engine.step_loss.check(state.num_items)
        loss = engine.step_loss.share(engine.step_loss.sum(state)) if compute_loss else None
    engine.module.train()
    if loss is not None and engine.global_rank == 0 and engine.monitor.enabled:
        engine.monitor.write_events([("Train/Samples/eval_loss", loss.item(), engine.global_samples)])
    if return_logits:
        return loss, [state.logits[m] for m in sorted(state.logits)]
    return loss
