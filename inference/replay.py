"""The replay: a trace of prompts against the bubbles of many ranks, as discrete events."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter_ns

from weft.inference.bubble_pattern import BubblePattern
from weft.inference.placement import PrefillPlacement
from weft.inference.prompt_work import PromptWork


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt: when it comes, counted from the first, and how long it is."""

    at_s: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What came of a trace.

    Attributes:
        seconds: the window in which bubbles were watched.
        waits_s: of each prompt taken, from its arrival to the begin of its first chunk: other
            prompts before it, and bubbles that open later but finish it sooner.
        queued_s: of each prompt taken, how much later it ends than if it were the only one.
        ttfts_s: of each prompt taken, from its arrival to its end.
        refused: prompts that no worker would have ended in time.
        prefill_share: of all ranks' time, what they spent on prefills.
        places_us: microseconds that each placement took.
    """

    seconds: float
    waits_s: Sequence[float]
    queued_s: Sequence[float]
    ttfts_s: Sequence[float]
    refused: int
    prefill_share: float
    places_us: Sequence[float]


def read_trace(path: Path) -> list[Arrival]:
    """The prompts of a CSV file with the columns TIMESTAMP and ContextTokens, as Azure publishes them.

    Raises:
        ValueError: it cannot be read, or is no such file; names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if not {"TIMESTAMP", "ContextTokens"} <= set(rows.fieldnames or ()):
                raise ValueError(f"trace {path}: no columns TIMESTAMP and ContextTokens; give a trace of that form")
            found = [_row(path, rows.line_num, row) for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path}: cannot be read ({error})") from error
    if len(found) < 2:
        raise ValueError(f"trace {path}: {len(found)} prompts; a replay needs at least 2")
    found.sort()
    return [Arrival(time - found[0][0], tokens) for time, tokens in found]


def _row(path: Path, line: int, row: dict[str, str]) -> tuple[float, int]:
    try:
        # Seven decimals of a second in the file, of which a datetime takes six.
        time = datetime.fromisoformat(row["TIMESTAMP"][:26])
        tokens = int(row["ContextTokens"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"trace {path}, line {line}: {error}") from error
    if tokens < 1:
        raise ValueError(f"trace {path}, line {line}: ContextTokens={tokens}: a prompt has at least 1 token")
    return (time - datetime(1970, 1, 1)).total_seconds(), tokens


def sped_up(trace: Sequence[Arrival], factor: float, seconds: float) -> Iterator[Arrival]:
    """The trace ``factor`` times as fast, from the beginning again until ``seconds`` are full."""
    length_s = trace[-1].at_s * len(trace) / (len(trace) - 1)
    begin_s = 0.0
    while True:
        for arrival in trace:
            at_s = begin_s + arrival.at_s / factor
            if at_s >= seconds:
                return
            yield Arrival(at_s, arrival.tokens)
        begin_s += length_s / factor


def replay(
    patterns: Sequence[BubblePattern],
    arrivals: Iterable[Arrival],
    work: PromptWork,
    *,
    seconds: float,
    warm_s: float = 0.0,
    deadline_s: float = float("inf"),
) -> Replay:
    """Place every prompt when it arrives, on the worker that finishes it soonest.

    Args:
        patterns: of each rank's worker; its overhead is that of ``work``.
        arrivals: in order.
        seconds: when the watch of the bubbles ends.
        warm_s: when it begins.
        deadline_s: longest time to the first token; what takes longer is refused.
    """
    placement, idle = (PrefillPlacement(patterns[0].period_s) for _ in range(2))
    for worker, pattern in enumerate(patterns):
        placement.set(worker, pattern, 0.0)
        idle.set(worker, pattern, 0.0)
    waits_s, queued_s, ttfts_s, places_us = [], [], [], []
    refused, busy_s = 0, 0.0
    for arrival in arrivals:
        work_s = work.work_s(arrival.tokens)
        begun_ns = perf_counter_ns()
        slot = placement.find(arrival.at_s, work_s)
        if slot is None or slot.end_s - arrival.at_s > deadline_s:
            refused += 1
            continue
        placement.take(slot)
        places_us.append((perf_counter_ns() - begun_ns) / 1e3)
        waits_s.append(slot.begin_s - arrival.at_s)
        ttfts_s.append(slot.end_s - arrival.at_s)
        alone = idle.find(arrival.at_s, work_s)
        queued_s.append(slot.end_s - alone.end_s if alone else 0.0)
        spans = patterns[slot.worker].spans(slot.begin_s, work_s)
        busy_s += sum(max(0.0, min(end_s, seconds) - max(start_s, warm_s)) for start_s, end_s in spans)
    return Replay(
        seconds=seconds - warm_s,
        waits_s=waits_s,
        queued_s=queued_s,
        ttfts_s=ttfts_s,
        refused=refused,
        prefill_share=busy_s / ((seconds - warm_s) * len(patterns)),
        places_us=places_us,
    )
