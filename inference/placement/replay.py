"""Discrete-event simulation of a trace of prompts against the bubbles of many ranks."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, count, islice
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter_ns

from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.prefill_placement import PrefillPlacement
from weft.inference.placement.prompt_work import PromptWork

SAME_SHARE = 0.005
"""Half the width of the confidence intervals at which a replay stops, relative to prompts, deadline and ranks' time."""
STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t of 95 % intervals of the mean of two values, three, and so on."""
MAX_WINDOWS = 60
"""Number of windows after which the search for a steady state stops."""
MOST_TRACE_S = 366 * 86400.0
"""Longest trace: times are kept to a microsecond also after it has been repeated often."""
MOST_TOKENS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt: its arrival time in seconds after the first prompt, and its length."""

    at_s: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Statistics of the prompts that arrived in a time window.

    Attributes:
        waits_s: for each accepted prompt, seconds from arrival to the begin of its first chunk.
        queued_s: for some accepted prompts, seconds by which it ends later than on an idle fleet.
        ttfts_s: for each accepted prompt, seconds from arrival to end (time to first token).
        refused: number of prompts that would have missed the deadline.
        prefill_share: share of all ranks' time in the window spent on prefills.
        places_us: microseconds of each placement decision.
        steady: True if the confidence intervals are narrow.
    """

    seconds: float
    waits_s: Sequence[float]
    queued_s: Sequence[float]
    ttfts_s: Sequence[float]
    refused: int
    prefill_share: float
    places_us: Sequence[float]
    steady: bool = False

    @property
    def refused_share(self) -> float:
        """Share of arrived prompts that were refused, or 0.0 if none arrived."""
        return self.refused / max(1, self.refused + len(self.ttfts_s))

    @property
    def mean_queued_s(self) -> float:
        """Mean of `queued_s`, or 0.0 if it is empty."""
        return sum(self.queued_s) / max(1, len(self.queued_s))


def read_trace(path: Path) -> list[Arrival]:
    """Read a CSV file with columns TIMESTAMP and ContextTokens, the format of Azure's traces.

    Raises:
        ValueError: the file cannot be read or is invalid. The message names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if not {"TIMESTAMP", "ContextTokens"} <= set(rows.fieldnames or ()):
                raise ValueError(f"trace {path}: needs columns TIMESTAMP and ContextTokens")
            found = [_row(path, rows.line_num, row) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"trace {path}: cannot be read ({error})") from error
    if len(found) < 2:
        raise ValueError(f"trace {path}: {len(found)} prompts; a replay needs at least 2")
    found.sort()
    if (span_s := found[-1][0] - found[0][0]) > MOST_TRACE_S:
        raise ValueError(
            f"trace {path}: its prompts span {span_s / 86400:,.0f} days, and at most {MOST_TRACE_S / 86400:,.0f} are "
            "replayed; correct TIMESTAMP"
        )
    if not span_s:
        raise ValueError(f"trace {path}: all {len(found)} prompts have one TIMESTAMP, which is no rate; spread them")
    return [Arrival(time - found[0][0], tokens) for time, tokens in found]


def _row(path: Path, line: int, row: dict[str, str]) -> tuple[float, int]:
    try:
        # The file has seven decimals of a second, a datetime six.
        time = datetime.fromisoformat(row["TIMESTAMP"][:26])
        tokens = int(row["ContextTokens"])
        seconds = (time - datetime(1970, 1, 1, tzinfo=time.tzinfo)).total_seconds()
    except (TypeError, ValueError) as error:
        raise ValueError(f"trace {path}, line {line}: {error}") from error
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(
            f"trace {path}, line {line}: ContextTokens={str(tokens)[:20]}: a prompt has at least 1 token, and at most "
            f"{MOST_TOKENS:,}"
        )
    return seconds, tokens


def length_s(trace: Sequence[Arrival]) -> float:
    """Return the length of a trace when repeated, with the mean inter-arrival time after its last prompt."""
    return trace[-1].at_s * len(trace) / (len(trace) - 1)


def sped_up(trace: Sequence[Arrival], factor: float) -> Iterator[Arrival]:
    """Yield the prompts of the trace, repeated forever and sped up by ``factor``.

    Raises:
        ValueError: the factor is not positive, or the trace has length 0.
    """
    if not 0.0 < factor < inf or length_s(trace) <= 0.0:
        raise ValueError(f"a trace of {length_s(trace):g} s cannot be sped up {factor:g} times")
    for loop in count():
        for arrival in trace:
            yield Arrival((loop * length_s(trace) + arrival.at_s) / factor, arrival.tokens)


def replay(
    patterns: Sequence[BubblePattern],
    arrivals: Iterable[Arrival],
    work: PromptWork,
    *,
    window_s: float,
    deadline_s: float = inf,
    sample: int = 1,
) -> Iterator[Replay]:
    """Place every prompt on arrival on the worker that finishes it first. Yield the statistics of each window.

    A window is yielded when a later prompt arrives, or at the end.

    Args:
        patterns: the bubble pattern of each rank's worker, with the overhead of ``work``.
        arrivals: arrival times of prompts, in order.
        deadline_s: maximum time to first token. Prompts that would take longer are refused.
        sample: `Replay.queued_s` has one of so many accepted prompts.
    """
    placement, idle = (PrefillPlacement(patterns[0].period_s) for _ in range(2))
    for worker, pattern in enumerate(patterns):
        placement.set(worker, pattern, 0.0)
        idle.set(worker, pattern, 0.0)
    busy_s: defaultdict[int, float] = defaultdict(float)
    window = _Window(0)
    for arrival in arrivals:
        while arrival.at_s >= (window.number + 1) * window_s:
            yield window.result(window_s, busy_s.pop(window.number, 0.0) / (window_s * len(patterns)))
            window = _Window(window.number + 1)
        work_s = work.work_s(arrival.tokens)
        begun_ns = perf_counter_ns()
        slot = placement.find(arrival.at_s, work_s)
        if slot is None or slot.end_s - arrival.at_s > deadline_s:
            window.refused += 1
            continue
        placement.take(slot)
        window.places_us.append((perf_counter_ns() - begun_ns) / 1e3)
        window.waits_s.append(slot.begin_s - arrival.at_s)
        window.ttfts_s.append(slot.end_s - arrival.at_s)
        if not (len(window.ttfts_s) - 1) % sample:
            alone = idle.find(arrival.at_s, work_s)
            window.queued_s.append(slot.end_s - alone.end_s if alone else 0.0)
        for start_s, end_s in patterns[slot.worker].spans(slot.begin_s, work_s):
            for number in range(int(start_s // window_s), int(end_s // window_s) + 1):
                shared_s = min(end_s, (number + 1) * window_s) - max(start_s, number * window_s)
                busy_s[number] += max(0.0, shared_s)
    yield window.result(window_s, busy_s.pop(window.number, 0.0) / (window_s * len(patterns)))


@dataclass
class _Window:
    """Statistics of the current window."""

    number: int
    waits_s: list[float] = field(default_factory=list)
    queued_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    refused: int = 0
    places_us: list[float] = field(default_factory=list)

    def result(self, window_s: float, prefill_share: float) -> Replay:
        return Replay(
            seconds=window_s,
            waits_s=self.waits_s,
            queued_s=self.queued_s,
            ttfts_s=self.ttfts_s,
            refused=self.refused,
            prefill_share=prefill_share,
            places_us=self.places_us,
        )


def steady_state(windows: Iterable[Replay], *, deadline_s: float, most: int = MAX_WINDOWS) -> Replay:
    """Return the later half of the windows, together, as soon as the confidence intervals of its means are narrow.

    Overloaded queues fill until requests are refused, which may take many deadlines. The later half leaves that out: as
    long as queues fill, its windows differ, and its intervals are wide.

    Args:
        most: number of windows after which the search stops.
    """
    seen: list[Replay] = []
    for window in islice(windows, most):
        seen.append(window)
        latest = seen[-max(2, len(seen) // 2) :]
        if len(latest) > 1 and _is_narrow(latest, deadline_s):
            return _together(latest, steady=True)
    assert seen, "a replay has at least one window"
    return _together(seen[len(seen) // 2 :], steady=False)


def _is_narrow(windows: Sequence[Replay], deadline_s: float) -> bool:
    """True if the mean refused share, queueing time and share of the ranks' time are known to `SAME_SHARE`."""
    values = [(each.refused_share, each.mean_queued_s / deadline_s, each.prefill_share) for each in windows]
    student = STUDENT_95[min(len(windows) - 2, len(STUDENT_95) - 1)]
    return all(student * stdev(column) / sqrt(len(column)) <= SAME_SHARE for column in zip(*values, strict=True))


def _together(windows: Sequence[Replay], *, steady: bool) -> Replay:
    def all_of(name: str) -> list[float]:
        return list(chain.from_iterable(getattr(window, name) for window in windows))

    return Replay(
        seconds=sum(window.seconds for window in windows),
        waits_s=all_of("waits_s"),
        queued_s=all_of("queued_s"),
        ttfts_s=all_of("ttfts_s"),
        refused=sum(window.refused for window in windows),
        prefill_share=fmean(window.prefill_share for window in windows),
        places_us=all_of("places_us"),
        steady=steady,
    )
