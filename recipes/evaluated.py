"""Results of evaluations that other processes compute while a run trains, and their way into the run's logs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.conf.host.private import append_private

RESULTS = "evaluations.jsonl"
"""File in the run's folder with one JSON object per evaluated checkpoint."""
KIND = "checkpoint"
"""Kind of these records in the run's logs."""


class Results:
    """The results in a run's folder that its logs do not have yet."""

    def __init__(self, folder: Path) -> None:
        """Begin after the results that ``metrics.jsonl`` in ``folder`` has."""
        self._file = folder / RESULTS
        self._size = 0
        logged = _lines(folder / "metrics.jsonl")
        self._logged = {line["step"] for line in logged if line.get("kind") == KIND and "step" in line}

    def take(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the metrics of each new result."""
        try:
            size = self._file.stat().st_size
        except OSError:
            return
        if size == self._size:
            return
        self._size = size
        for line in _lines(self._file):
            step, metrics = line.get("step"), line.get("metrics")
            if isinstance(step, int) and isinstance(metrics, dict) and step not in self._logged:
                self._logged.add(step)
                yield step, {str(name): float(value) for name, value in metrics.items()}


def known_serials(folder: Path) -> set[int]:
    """Return the serial numbers of the checkpoints that have results."""
    return {line["serial"] for line in _lines(folder / RESULTS) if "serial" in line}


def add_result(folder: Path, *, step: int, serial: int, metrics: Mapping[str, float]) -> None:
    """Add the result of a checkpoint."""
    line = json.dumps({"step": step, "serial": serial, "metrics": dict(metrics)})
    append_private(folder / RESULTS, f"{line}\n")


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # cut short by a full disk
        if isinstance(value, dict):
            yield value
