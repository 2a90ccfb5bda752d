"""Logs of metrics: JSON lines, TensorBoard and Weights & Biases, all with the same step axis."""

from __future__ import annotations

import errno
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from itertools import takewhile
from math import inf, isfinite
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from weft.conf.host.private import make_run_folder, write_private
from weft.conf.schema import WeftConfig
from weft.conf.trees import shown_tree
from weft.engine.checkpoint.durable import OUT_OF_SPACE
from weft.engine.distributed import is_supervised

log = logging.getLogger(__name__)

STEP = "train/global_step"
"""Name of the step axis at Weights & Biases, as in transformers' Trainer."""
WAITED_FOR = {*OUT_OF_SPACE, errno.EROFS}
"""Error numbers of the operating system after which lines of metrics wait."""
_Record: TypeAlias = tuple[str, int, Mapping[str, float]]
"""Kind, step and metrics of a record."""
SLOW_WRITE_S = 1.0
"""Seconds after which a write counts as waiting for storage instead of as part of a step."""


class Log(Protocol):
    """A destination for metrics."""

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics after ``step`` steps. ``kind`` is train or eval."""

    def go_back(self, step: int) -> None:
        """Remove the records after step ``step``, if the destination supports it."""

    def close(self) -> None:
        """Flush and close the destination."""


def open_logs(config: WeftConfig, folder: Path, start: int) -> list[Log]:
    """Open the logs that ``config.logging`` enables. Only the rank that writes them may call this.

    Args:
        start: number of steps that a resumed run has already done.

    Raises:
        ValueError: Weights & Biases cannot be used.
    """
    make_run_folder(folder)
    logs: list[Log] = []
    if config.logging.jsonl:
        logs.append(JsonLines(folder / "metrics.jsonl", start if start or is_supervised(config) else None))
    if config.logging.tensorboard:
        logs.append(TensorBoard(folder, start))
    if config.logging.wandb:
        logs.append(WeightsAndBiases(config, folder, resumed=start > 0))
    return logs


class LogWriter:
    """Writer of logs in a thread, so that the supervisor can tell a rank with slow storage from a rank that hangs."""

    def __init__(self, logs: Sequence[Log], waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Write to ``logs``.

        Args:
            waiting: context to enter if a write takes longer than `SLOW_WRITE_S`.
        """
        self._logs, self._waiting = logs, waiting
        self._thread = ThreadPoolExecutor(1, "weft-logs")

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics after ``step`` steps, and wait until they are written."""
        self._await(lambda log: log.write(kind, step, metrics))

    def go_back(self, step: int) -> None:
        """Remove the records after step ``step``."""
        self._await(lambda log: log.go_back(step))

    def close(self) -> None:
        """Flush and close all logs."""
        self._await(lambda log: log.close())
        self._thread.shutdown()

    def _await(self, do: Callable[[Log], None]) -> None:
        if not self._logs:
            return

        def write() -> None:
            for log in self._logs:
                do(log)

        writing = self._thread.submit(write)
        if not wait([writing], SLOW_WRITE_S).done:
            with self._waiting():
                wait([writing])
        writing.result()


class _FileLog(ABC):
    """A log in files. On a full or read-only disk, records are queued."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting, self._is_refused = path, list[_Record](), False

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics, after the queued records. If the disk is full or read-only, queue them."""
        self._waiting.append((kind, step, metrics))
        self._write_waiting()

    def go_back(self, step: int) -> None:
        """Remove the queued records after step ``step``."""
        self._waiting = [record for record in self._waiting if record[1] <= step]

    def close(self) -> None:
        """Write the queued records, if there is space now."""
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            self._put(self._waiting)
        except OSError as error:
            if error.errno not in WAITED_FOR:
                self._waiting = []
                raise
            if not self._is_refused:
                log.warning("%s: %s; its next lines wait", self._path, error.strerror)
            self._is_refused = True
        else:
            self._waiting, self._is_refused = [], False

    @abstractmethod
    def _put(self, records: Sequence[_Record]) -> None:
        """Write records, of which none is written if this raises OSError."""


class JsonLines(_FileLog):
    """A log with one JSON object per line, flushed after every line. Numbers that are not finite become null."""

    def __init__(self, path: Path, start: int | None = None) -> None:
        """Append to ``path``.

        Args:
            start: number of steps that the run had done when it was resumed. Lines of later steps are removed, because
                these steps are repeated. None keeps all lines.
        """
        super().__init__(path)
        if start is not None:
            self.go_back(start)

    def _put(self, records: Sequence[_Record]) -> None:
        if not records:
            return
        lines = b"".join(map(_line, records))
        mode = self._path.parent.stat().st_mode & 0o666  # as open as the run's folder
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
        size = os.fstat(file).st_size
        try:
            written = 0
            while written < len(lines):
                written += os.write(file, lines[written:])
        except OSError:
            os.ftruncate(file, size)  # a line is there as a whole, or waits
            raise
        finally:
            os.close(file)

    def go_back(self, step: int) -> None:
        """Truncate the file where later steps begin, which needs no space on a full disk."""
        super().go_back(step)
        if self._path.exists():
            os.truncate(self._path, len(_until(step, self._path.read_bytes())))


def _line(record: _Record) -> bytes:
    kind, step, metrics = record
    values = {name: value if isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, "kind": kind, **values}).encode() + b"\n"


def _until(step: int, lines: bytes) -> bytes:
    """Return the lines before the first line of a later step."""
    kept: list[bytes] = list(takewhile(lambda line: _step_of(line) <= step, lines.splitlines(keepends=True)))
    return b"".join(kept)


def _step_of(line: bytes) -> float:
    """Return the step of a line of metrics, or infinity if a crash has truncated the line."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else inf
    except (ValueError, KeyError, TypeError):
        return inf


class TensorBoard(_FileLog):
    """TensorBoard event files in the run's folder."""

    def __init__(self, folder: Path, start: int) -> None:
        """Open a writer that hides events after step ``start`` from an earlier attempt."""
        super().__init__(folder)
        self._last: list[_Record] = []
        self._open(start)

    def _open(self, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._writer = SummaryWriter(log_dir=str(self._path), purge_step=start + 1)

    def _put(self, records: Sequence[_Record]) -> None:
        if self._is_refused:  # the writer's thread has ended, perhaps amid the record before
            self._require_space()
            records = [*self._last, *records]
            self._open(min(step for _, step, _ in records) - 1)
        for kind, step, metrics in records:
            for name, value in metrics.items():
                self._writer.add_scalar(f"{kind}/{name}", value, step)
        self._writer.flush()
        self._last = [*records[-1:]]

    def _require_space(self) -> None:
        """Raise OSError if the folder takes no file. A writer's thread would print a traceback."""
        probe = self._path / ".events"
        try:
            probe.write_bytes(bytes(1 << 16))
        finally:
            with suppress(OSError):
                probe.unlink()

    def go_back(self, step: int) -> None:
        """Hide events after step ``step``."""
        super().go_back(step)
        self.close()
        self._last = []
        try:
            self._open(step)
        except OSError:
            self._is_refused = True  # the next record opens it

    def close(self) -> None:
        """Write the queued records, if there is space now, and close the file."""
        super().close()
        if not self._is_refused:
            self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run.

    W&B's own step can only increase, and records for an earlier step are dropped. Therefore the step is a metric of its
    own and the axis of the other metrics, so that a resumed run can repeat steps.
    """

    def __init__(self, config: WeftConfig, folder: Path, *, resumed: bool) -> None:
        """Start a run, or resume one.

        The run that WANDB_RUN_ID names is resumed. Without it, and if ``resumed``, it is the folder's previous run.

        Raises:
            ValueError: the run cannot be started.
        """
        import wandb

        remembered = folder / "wandb_run_id"
        known = remembered.read_text().strip() if resumed and remembered.exists() else None
        known = os.environ.get("WANDB_RUN_ID") or known
        try:
            self._run: Any = wandb.init(
                id=known,
                resume="allow" if known else None,
                project=config.logging.wandb_project or os.environ.get("WANDB_PROJECT") or "weft",
                name=config.logging.wandb_name or os.environ.get("WANDB_NAME") or config.train.name,
                group=config.logging.wandb_group or os.environ.get("WANDB_RUN_GROUP") or None,
                dir=None if "WANDB_DIR" in os.environ else str(folder),
                config=shown_tree(config),
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
        """Log metrics together with the step."""
        self._run.log({STEP: step, **{f"{kind}/{name}": value for name, value in metrics.items()}})

    def go_back(self, step: int) -> None:
        """Do nothing, because the step axis is a metric, so that later records replace earlier ones."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
