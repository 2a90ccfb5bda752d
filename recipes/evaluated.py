"""Results of evaluations that other processes compute while a run trains, and their way into the run's logs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.conf.host.json_records import JsonRecords
from weft.conf.host.private import append_private

RESULTS = "evaluations.jsonl"
"""File in the run's folder with one JSON object per evaluated checkpoint."""
KIND = "checkpoint"
"""Kind of these records in the run's logs."""


class Results:
    """The results in a run's folder that its logs do not have yet."""

    def __init__(self, folder: Path) -> None:
        """Begin after the results that ``metrics.jsonl`` in ``folder`` has."""
        self._file, self._taken = JsonRecords(folder / RESULTS), 0
        logged = JsonRecords(folder / "metrics.jsonl").read()
        self._logged = {record["step"] for record in logged if record.get("kind") == KIND and "step" in record}

    def take(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the metrics of each new result."""
        records = self._file.read()
        new, self._taken = records[self._taken :], len(records)
        for record in new:
            step, metrics = record.get("step"), record.get("metrics")
            if step in self._logged:
                self._logged.remove(step)  # a later result of this step is of a run that went back
            elif isinstance(step, int) and isinstance(metrics, dict):
                yield step, {str(name): float(value) for name, value in metrics.items()}


def known_serials(folder: Path) -> set[int]:
    """Return the serial numbers of the checkpoints that have results."""
    return {record["serial"] for record in JsonRecords(folder / RESULTS).read() if "serial" in record}


def add_result(folder: Path, *, step: int, serial: int, metrics: Mapping[str, float]) -> None:
    """Add the result of a checkpoint."""
    line = json.dumps({"step": step, "serial": serial, "metrics": dict(metrics)})
    append_private(folder / RESULTS, f"{line}\n")
