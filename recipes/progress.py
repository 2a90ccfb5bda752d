"""Progress of a run: what rank 0 displays, and metrics in every log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from weft.conf.schema import Float8, WeftConfig
from weft.engine.data import MicrobatchLoader
from weft.engine.distributed import together
from weft.engine.engine import WeftEngine
from weft.engine.observability.usage import model_flops_per_token
from weft.engine.observability.watcher import Phase
from weft.engine.planning.devices import peak_flops
from weft.recipes.evaluated import KIND, Results
from weft.recipes.logs import LogWriter, open_logs
from weft.recipes.shown import Shown


@dataclass
class _Interval:
    """The steps since the last record.

    Attributes:
        tokens: number of tokens that this rank has read for them, without padding.
        last: number of the last step, its loss and its learning rate.
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    last: tuple[int, Tensor, float] = (0, torch.zeros(()), 0.0)


class Progress:
    """Display and logs of a run's steps."""

    def __init__(
        self, config: WeftConfig, engine: WeftEngine, folder: Path, loader: MicrobatchLoader, start: int
    ) -> None:
        """Open the logs. Collective call.

        Args:
            folder: the run's folder. Rank 0 creates it.
            start: number of steps that a resumed run has already done.

        Raises:
            ValueError: a log cannot be opened.
        """
        self._config = config
        self._engine = engine
        self._loader = loader
        self._is_writer = engine.global_rank == 0
        self._flops = model_flops_per_token(engine.module, config.data.sequence_length, engine.device)
        self._peak = peak_flops(engine.device) * engine.world_size
        self._since = perf_counter()
        self._interval = _Interval()
        self._start = start
        self._is_first_pass = not loader.is_countable and loader.epoch < 1
        self._rate = engine.get_lr()[0]
        logs = together(lambda: open_logs(config, folder, start) if self._is_writer else [])
        self._logs = LogWriter(logs, lambda: engine.watcher.within(Phase.checkpoint))
        evaluates = self._is_writer and config.inference.evaluate.enabled
        self._evaluated = Results(folder) if evaluates else None

    def __enter__(self) -> Progress:
        shows = self._is_writer and self._config.logging.progress
        self._shown = Shown(total=self._config.train.steps, start=self._start, is_on=shows)
        self.note(f"{self._loader.description}; {_layout(self._engine)}")
        return self

    def begin_step(self) -> None:
        """Start the clock of a step. The time since the end of the last step does not count."""
        self._since, self._read = perf_counter(), self._loader.tokens

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._shown.close()
        self._logs.close()

    def step(self, step: int, loss: Tensor) -> None:
        """Record a finished step. Every ``logging.every`` steps this is a collective call."""
        done, is_recorded = self._interval, step % self._config.logging.every == 0
        if is_recorded or self._config.train.max_seconds:
            loss = loss.cpu()  # what waits for the device is part of the step
        done.steps, done.seconds = done.steps + 1, done.seconds + perf_counter() - self._since
        done.tokens += self._loader.tokens - self._read
        done.last = step, loss, self._rate
        text = self._record() if is_recorded else None
        self._rate = self._engine.get_lr()[0]
        self._shown.step(step, text)
        if self._is_first_pass and self._loader.epoch >= 1:
            self._is_first_pass = False
            self.note(f"step {step}: all data has been read, and is read again from the beginning")
        for of, metrics in self._evaluated.take() if self._evaluated is not None else ():
            self.note(f"step {of}: checkpoint's loss {metrics['loss']:.4f}, perplexity {metrics['perplexity']:.3f}")
            self._logs.write(KIND, of, metrics)

    def end(self) -> None:
        """Write the record of the last steps of a run, if they have none. Collective call."""
        if self._interval.steps:
            self.note(f"step {self._interval.last[0]}: {self._record()}")

    def go_back(self, step: int) -> None:
        """Remove the records of steps after ``step``, which will be repeated."""
        self._logs.go_back(step)
        self._shown.go_back(step)
        self._rate = self._engine.get_lr()[0]
        self._interval = _Interval()

    def _record(self) -> str:
        """Write the record of the steps since the last one, and return it as a line of text. Collective call."""
        metrics, step = self._metrics(self._interval), self._interval.last[0]
        self._interval = _Interval()
        if self._is_writer:
            self._logs.write("train", step, metrics)
        return _text(metrics, " of bf16" if self._config.model.float8 is not Float8.none else "")

    def _metrics(self, interval: _Interval) -> dict[str, float]:
        _, loss, rate = interval.last
        seconds = interval.seconds / interval.steps
        read = torch.tensor(float(interval.tokens), dtype=torch.float64, device=self._engine.device)
        dist.all_reduce(read)  # all ranks of a replica read the same
        tokens = float(read) * self._engine.num_replicas / self._engine.world_size / interval.steps
        usage = self._engine.usage()
        scores = self._engine.scores
        ahead = {} if scores is None or not scores.steps_ahead else {"scores_ahead": scores.share_ahead}
        scale = {"loss_scale": float(self._engine.optimizer.cur_scale)} if self._engine.fp16_enabled() else {}
        return {
            "loss": float(loss),
            "epoch": self._loader.epoch,
            "lr": rate,  # the engine already has the next step's
            "grad_norm": self._engine.get_global_grad_norm() or 0.0,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": tokens * self._flops / seconds / self._peak,
            "bubble_share": usage.bubble_share,
            "peak_memory_gb": usage.peak_bytes / 1e9,
            **scale,
            **ahead,
        }

    def evaluation(self, step: int, loss: float) -> None:
        """Print and log the loss of an evaluation."""
        self.note(f"step {step}: evaluation loss {loss:.4f}")
        if self._is_writer:
            self._logs.write("eval", step, {"loss": loss})

    def note(self, text: str) -> None:
        """Print a line on rank 0."""
        if self._is_writer:
            self._shown.note(text)


def _text(metrics: dict[str, float], peak: str) -> str:
    return (
        f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tok/s, "
        f"MFU {metrics['mfu']:.1%}{peak}, bubbles {metrics['bubble_share']:.0%}"
    )


def _layout(engine: WeftEngine) -> str:
    """Return one line about the layout of the work."""
    schedule, stages = engine.schedule, engine.num_stages * len(engine.schedule.placement.legs)
    return (
        f"{schedule.name}, {stages} stages on {engine.num_stages} ranks x {engine.num_replicas} replicas, "
        f"{engine.micro_batches} micro-batches, ZeRO-{engine.weft.zero.stage}"
    )
