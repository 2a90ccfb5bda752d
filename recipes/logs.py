"""Where a run's metrics go: one record a step and kind, on the same axis in every log."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from weft.conf.private import make_run_folder, write_private
from weft.conf.schema import WeftConfig
from weft.conf.trees import to_tree

STEP = "train/global_step"
"""The axis at Weights & Biases, by the name that transformers' Trainer gives it."""


class Log(Protocol):
    """One place for metrics."""

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record what is known after ``step`` steps; ``kind`` is train or eval."""

    def close(self) -> None:
        """Write what is still held."""


def open_logs(config: WeftConfig, folder: Path, start: int) -> list[Log]:
    """The logs that ``config.logging`` asks for, on the one rank that writes.

    Args:
        folder: the run's.
        start: steps that a resumed run has behind it.

    Raises:
        ValueError: Weights & Biases does not let us in.
    """
    make_run_folder(folder)
    logs: list[Log] = []
    if config.logging.jsonl:
        logs.append(JsonLines(folder / "metrics.jsonl"))
    if config.logging.tensorboard:
        logs.append(TensorBoard(folder, start))
    if config.logging.wandb:
        logs.append(WeightsAndBiases(config, folder, resumed=start > 0))
    return logs


class JsonLines:
    """One object per line, whole at every line; a number that is not finite is null, as JSON has no other."""

    def __init__(self, path: Path) -> None:
        """Append to ``path``."""
        self._path = path

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        values = {name: value if isfinite(value) else None for name, value in metrics.items()}
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")

    def close(self) -> None:
        """Nothing is held."""


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: Path, start: int) -> None:
        """Hide what an earlier attempt wrote of the steps to come."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=start + 1)

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases.

    Its own step only ever grows, and drops what comes for a smaller one: the step is a metric
    here, and the axis of the others, so that a resumed run may repeat some.
    """

    def __init__(self, config: WeftConfig, folder: Path, *, resumed: bool) -> None:
        """Start a run, or go on with the one that WANDB_RUN_ID names or, if ``resumed``, that the folder remembers.

        Raises:
            ValueError: it cannot be started.
        """
        import wandb

        remembered = folder / "wandb_run_id"
        known = remembered.read_text().strip() if resumed and remembered.exists() else None
        known = os.environ.get("WANDB_RUN_ID") or known
        try:
            self._run: Any = wandb.init(
                id=known,
                resume="allow" if known else None,
                project=config.logging.wandb_project,
                name=config.train.name,
                dir=None if "WANDB_DIR" in os.environ else str(folder),
                config=to_tree(config),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"logging.wandb=true: {' '.join(str(error).split())}; run `wandb login`, set WANDB_MODE=offline, or "
                "set logging.wandb=false"
            ) from error
        write_private(remembered, f"{self._run.id}\n")
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log them together with the step."""
        self._run.log({STEP: step, **{f"{kind}/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        """End the run."""
        self._run.finish()
