"""The duties of DeepSpeed's `train_batch` besides training: timers, learning rate, counters, progress and monitors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from torch import Tensor

from weft.engine.execution.batches import draw
from weft.engine.execution.step_state import StepState
from weft.engine.planning.schedules import plan_evaluation


def begin_batch(engine: PipelineEngine, data_iter: Iterator | None) -> None:
    """Begin `train_batch`: read from ``data_iter`` from now on, if there is one, and start the timer.

    Raises:
        RuntimeError: gradients are switched off.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
    if data_iter is not None:
        engine.set_dataiterator(data_iter)
    if not all(module.training for module in engine.trained_modules):  # to set all of them costs host time
        engine.module.train()
    if engine.steps_per_print() is not None:  # otherwise nothing reads the timer, and its events would pile up
        engine.timers(TRAIN_BATCH_TIMER).start()


def advance(engine: PipelineEngine) -> None:
    """Count a step of the optimiser. If it was not skipped, advance the learning rate."""
    engine._step_applied = not engine.optimizer.overflow
    if engine.optimizer.overflow:
        engine.skipped_steps += 1
    elif engine.lr_scheduler is not None:
        try:
            engine.lr_scheduler.step()
        except TypeError:  # Megatron's schedules take the number of sequences
            engine.lr_scheduler.step(engine.train_batch_size())
    if engine.global_rank == 0 and _prints(engine, engine.global_steps + 1):
        engine._report_progress(engine.global_steps + 1)
    engine.global_steps += 1
    engine.global_samples += engine.train_batch_size()
    events = [("Train/Samples/lr", engine.get_lr()[0], engine.global_samples)]
    if engine.fp16_enabled():
        events.append(("Train/Samples/loss_scale", engine.optimizer.cur_scale, engine.global_samples))
    _write(engine, events)


def end_batch(engine: PipelineEngine, loss: Tensor) -> Tensor:
    """End `train_batch`: stop the timer, report the loss, and return a copy of it that the caller may keep."""
    engine.dp_group_loss, engine.agg_train_loss = loss, loss.clone()
    timer = engine.timers(TRAIN_BATCH_TIMER)
    if engine.steps_per_print() is not None:
        timer.stop()
    if _prints(engine, engine.global_steps):
        step_s = timer.elapsed(reset=True) / 1000.0 / engine.steps_per_print()
        if engine.global_rank == 0:
            rate = engine.train_batch_size() / step_s
            print(
                f"steps: {engine.global_steps} loss: {loss:0.4f} iter time (s): {step_s:0.3f} samples/sec: {rate:0.3f}"
            )
    _write(engine, [("Train/Samples/train_loss", loss, engine.global_samples)])
    return engine.agg_train_loss


def _prints(engine: PipelineEngine, step: int) -> bool:
    """True if DeepSpeed prints something at ``step`` (``steps_per_print``)."""
    every = engine.steps_per_print()
    return every is not None and step % every == 0


def _write(engine: PipelineEngine, events: list[tuple[str, Tensor | float, int]]) -> None:
    """Write events to the monitors of rank 0. This waits for values on the device, if there are monitors."""
    if engine.global_rank == 0 and engine.monitor.enabled:
        engine.summary_events = [(name, float(value), samples) for name, value, samples in events]
        engine.monitor.write_events(engine.summary_events)


def get_global_grad_norm(engine: PipelineEngine) -> float | None:
    """2-norm of the whole model's gradient in the last step, before clipping, or None before the first."""
    with engine.watcher.waiting():
        norm = engine.optimizer.gradient_norm
    return None if norm is None else norm.item()


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
        of_logits=(lambda logits, _: logits) if return_logits else None,
        **(engine.step_loss.count(batches) if compute_loss else {"num_items": None}),
    )
    with engine.neighbours.watching(), engine.interruption.caught("eval_batch"):
        if compute_loss and engine.scores is not None:
            engine.scores.compute(batches)
        engine.executor.run(schedule, state)
        engine.step_loss.check(state.num_items)
        loss = engine.step_loss.share(engine.step_loss.sum(state)) if compute_loss else None
    engine.module.train()
    if loss is not None and engine.global_rank == 0 and engine.monitor.enabled:
        engine.monitor.write_events([("Train/Samples/eval_loss", loss.item(), engine.global_samples)])
    if return_logits:
        return loss, [state.of_each[m] for m in sorted(state.of_each)]
    return loss
