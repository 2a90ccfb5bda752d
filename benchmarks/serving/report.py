"""Report of a run of `benchmarks bubbles`, as text and as figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.results import show
from benchmarks.serving.figures import steps_within, use_of
from benchmarks.serving.requests import Answer
from benchmarks.serving.watch import Watch, Windows
from weft.inference.board.common_bubbles import Spans
from weft.inference.worker.workers import Worker
from weft.tools.tables import table_of


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The observations.

    Attributes:
        steps: begin and end of each training step.
        prefills: records of each worker's steps, by worker.
        more: further figures, as text.
    """

    workers: Sequence[Worker]
    watch: Watch
    windows: Windows
    steps: Spans
    prefills: Mapping[int, Sequence[dict]]
    answers: Sequence[Answer]
    more: Mapping[str, str]


def prefills_of(folder: Path, workers: Sequence[Worker]) -> dict[int, list[dict]]:
    """Return the workers' records of their steps."""
    files = {worker.index: folder / f"worker{worker.index}.jsonl" for worker in workers}
    return {index: [json.loads(line) for line in file.read_text().splitlines()] for index, file in files.items()}


def spans_of(prefills: Iterable[dict], stage: int) -> list[tuple[float, float]]:
    """Return the times of prefills in a stage."""
    return sorted(tuple(record["spans"][stage]) for record in prefills)


def report_serving(found: Findings) -> dict[str, Any]:
    """Print the gains and costs of prefill, and return the figures: ``slower`` by how much steps are longer."""
    windows = found.windows
    off_s, on_s = (steps_within(found.steps, windows.spans[name]) for name in ("off", "on"))
    slower = median(on_s) / median(off_s) - 1
    medians = [
        [f"{1e3 * median(steps):.1f}" for span in windows.spans[name] if (steps := steps_within(found.steps, [span]))]
        for name in ("off", "on")
    ]
    rows = {
        "training step without prefill": _spread(off_s),
        "training step with": f"{_spread(on_s)}, {slower:+.2%}",
        "medians of the windows without, with": f"{'; '.join(map(', '.join, medians))} ms",
    }
    figures: dict[str, Any] = {"off_s": off_s, "on_s": on_s, "slower": slower}
    parts = [(worker, stage, rank) for worker in found.workers for stage, rank in enumerate(worker.ranks)]
    for worker, stage, rank in parts:
        use = use_of(found.watch.work(rank), spans_of(found.prefills[worker.index], stage), windows.spans["on"])
        figures[f"rank{rank}"] = vars(use)
        busy = f"{use.trained:.1%}, {use.trained + use.prefilled:.1%}"
        rows[f"utilisation of rank {rank} without, with prefill"] = busy
        rows[f"rank {rank}: bubble time used, prefill outside of it"] = f"{use.bubbles_used:.1%}, {use.outside:.1%}"
    records = [record for each in found.prefills.values() for record in each if _within(record, windows.spans["on"])]
    split = _bubbles_per_request(records)
    rows["bubbles per prompt"] = f"median {median(split):g}, most {max(split)}"
    good = sorted(answer.ttft_s for answer in found.answers if answer.status == 200)
    if found.answers:
        times = f"p50 {at(good, 0.5):.2f} s, p90 {at(good, 0.9):.2f} s"
        rows[f"TTFT, {len(good)} of {len(found.answers)} answered"] = times
    cells = ({"figure": name, "measured": value} for name, value in {**rows, **found.more}.items())
    show(table_of(cells, "training beside prefill in its bubbles", left=2))
    late = [record["late_s"] for record in records]
    return figures | {"late_s": late, "ttft_s": good, "bubbles_per_prompt": split}


def _within(record: dict, spans: Spans) -> bool:
    return any(low <= record["start_s"] <= high for low, high in spans)


def _bubbles_per_request(records: Iterable[dict]) -> list[int]:
    """Count the bubbles in which each prompt was computed."""
    found: dict[str, set] = {}
    for record in records:
        for request in record["tokens"]:
            found.setdefault(request, set()).add((record["step"], record["bubble"]))
    return [len(bubbles) for bubbles in found.values()] or [0]


def _spread(values: Sequence[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle * 1e3:.1f} ms ({(high - low) / middle:.2%} between quartiles, {len(values)} steps)"


def at(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, or NaN if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
