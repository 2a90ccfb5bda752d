"""What a run tells while it trains: a bar on rank 0, and the same metrics in every log."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from types import TracebackType

from torch import Tensor
from tqdm import tqdm

from weft.conf.schema import WeftConfig
from weft.engine.engine import WeftEngine
from weft.engine.flops import model_flops_per_token, peak_flops


class Progress:
    """Counts steps, and writes metrics where the configuration says."""

    def __init__(self, config: WeftConfig, engine: WeftEngine, folder: Path, data: str, start: int) -> None:
        """Open the bar and the logs; a collective call.

        Args:
            folder: the run's folder; rank 0 makes it.
            data: what the loader says of its source, for the log's first line.
            start: steps that a resumed run has behind it.
        """
        self._config = config
        self._engine = engine
        self._data = data
        self._speaks = engine.global_rank == 0
        self._tokens = config.train.microbatch_size * config.data.sequence_length * config.pipeline.microbatches
        self._tokens *= engine.num_replicas
        self._flops = self._tokens * model_flops_per_token(engine, config.data.sequence_length)
        self._peak = peak_flops(engine.device) * engine.world_size
        self._last = perf_counter()
        self._start = start
        self._path = folder / "metrics.jsonl"
        if self._speaks:
            folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Progress:
        """Start the bar."""
        shows = self._speaks and self._config.logging.progress
        self._bar = tqdm(
            total=self._config.train.steps, initial=self._start, disable=not shows, unit="step", dynamic_ncols=True
        )
        self.note(f"{self._data}; {self._engine.describe()}")
        self._last = perf_counter()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the bar; the logs are whole at every line."""
        self._bar.close()

    def step(self, step: int, loss: Tensor) -> None:
        """Take note of a finished step; a collective call every ``logging.every`` steps."""
        if step % self._config.logging.every == 0:
            metrics = self._metrics(loss)
            if self._speaks:
                self._show(metrics)
                self._write("train", step, metrics)
        self._bar.update(1)

    def _metrics(self, loss: Tensor) -> dict[str, float]:
        now = perf_counter()
        seconds, self._last = (now - self._last) / self._config.logging.every, now
        return {
            "loss": float(loss),
            "lr": self._engine.get_lr()[0],
            "grad_norm": self._engine.get_global_grad_norm() or 0.0,
            "step_seconds": seconds,
            "tokens_per_second": self._tokens / seconds,
            "mfu": self._flops / seconds / self._peak,
            "bubble_share": self._engine.bubble_share(),
        }

    def _show(self, metrics: dict[str, float]) -> None:
        self._bar.set_postfix_str(
            f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tok/s, "
            f"MFU {metrics['mfu']:.1%}, bubbles {metrics['bubble_share']:.0%}",
            refresh=False,
        )

    def evaluation(self, step: int, loss: float) -> None:
        """Take note of an evaluation."""
        self.note(f"step {step}: evaluation loss {loss:.4f}")
        if self._speaks:
            self._write("eval", step, {"loss": loss})

    def note(self, text: str) -> None:
        """Say something above the bar, on rank 0."""
        if self._speaks:
            self._bar.write(text)

    def _write(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if self._config.logging.jsonl:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, "kind": kind, **metrics}) + "\n")
        if self._engine.monitor.enabled:
            self._engine.monitor.write_events([(f"{kind}/{name}", value, step) for name, value in metrics.items()])
