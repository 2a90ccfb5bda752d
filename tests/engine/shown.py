"""Effects of a step besides its loss, by Weft's `train_batch` and by DeepSpeed's own around the same computations."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine

from tests.engine.tiny import LENGTH, VOCAB, batches
from weft.engine import initialize
from weft.engine.engine import WeftEngine
from weft.engine.execution.step_state import StepState

SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}


class ThroughDeepSpeed(WeftEngine):
    """Executes DeepSpeed's `train_batch` and `_exec_optimizer_step`, with Weft's parts between them."""

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        return PipelineEngine.train_batch(self, data_iter)

    def _train_schedule(self) -> Any:
        return self.plan_for(self.micro_batches)

    def _exec_schedule(self, plan: Any) -> None:
        read = self._read(self.micro_batches)
        state = StepState(batches=read, training=True, **self.step_loss.count(read))
        trace = self._begin_step(plan, state)
        self.executor.run(plan.schedule, state)
        with self.executor.stepping(plan.schedule, state):
            self._sum = self.step_loss.sum(state)
            self.optimizer.reduce()
            self.optimizer.clip()
            self._exec_optimizer_step()
        self._end_step(trace, state)

    def _aggregate_total_loss(self) -> torch.Tensor:
        return self.step_loss.share(self._sum).clone()


class Monitor:
    """Keeps what is written to it."""

    enabled = True

    def __init__(self) -> None:
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, events: Any) -> None:
        self.events += [(name, float(value), samples) for name, value, samples in events]


def shown(kind: type[WeftEngine]) -> dict[str, Any]:
    """Events, lines, timers and counters of four steps in fp16, of which the first overflow."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 2,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True, "initial_scale_power": 21, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
        "weft": {
            "enabled": True,
            "pipeline": {"stages": 1},
            "model": {"arch": "llama", "overrides": SHAPE | HEADS, "self_check": False},
        },
    }
    with mock.patch.object(initialize, "WeftEngine", kind):
        engine, *_ = initialize.initialize(config=config)
    assert type(engine) is kind
    engine.monitor, lines, output = Monitor(), list[str](), io.StringIO()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    counters = []
    with contextlib.redirect_stdout(output):
        for _ in range(4):
            loss = engine.train_batch(batches(0, 1))
            assert loss is engine.agg_train_loss
            counters.append((engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps))
            counters.append((engine.was_step_applied(), *engine.get_lr(), float(loss), engine.optimizer.cur_scale))
    logger.removeHandler(handler)
    found = {
        "events": engine.monitor.events,
        "printed": re.sub(r"(\(s\)|/sec): \S+", r"\1: #", output.getvalue()),
        "logged": [line for line in lines if "step=" in line],
        "timers": sorted(engine.timers.timers),
        "counters": counters,
    }
    engine.destroy()
    return found


def both() -> tuple[dict[str, Any], dict[str, Any]]:
    """`shown` of Weft's engine and of the one that goes through DeepSpeed."""
    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign]
    return shown(WeftEngine), shown(ThroughDeepSpeed)


def fp16_refused() -> None:
    """Begin an fp16 engine where DeepSpeed has no fp16."""
    get_accelerator().is_fp16_supported = lambda: False  # type: ignore[method-assign]
    shown(WeftEngine)
