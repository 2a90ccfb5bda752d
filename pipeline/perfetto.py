"""Export timelines as a JSON trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.conf.host.files import write_atomic
from weft.pipeline.action import COMPUTE, Action, Op, Slot
from weft.pipeline.timeline import COMPUTE_LANE, SEND_LANE, Span, Timeline

_CONSUMER_OF = {Op.SEND_F: (Op.F, 1), Op.SEND_B: (Op.B, -1)}
"""The operation that consumes a send, and its stage relative to the sender's."""


def write_perfetto(timelines: Sequence[Timeline], path: Path) -> None:
    """Write ``timelines`` to one trace: rank by rank, each rank once per timeline.

    A rank is a process and its lanes are threads; arrows lead from transfers to their consumers.
    """
    write_atomic(path, json.dumps(perfetto_trace(timelines)))


def perfetto_trace(
    timelines: Sequence[Timeline], names: Sequence[Sequence[str]] = (), first_process: int = 1
) -> dict[str, Any]:
    """Return the trace that `write_perfetto` writes.

    Args:
        names: of each timeline, the names of its ranks in the trace. Empty numbers them.
        first_process: number of the first process. Each rank of each timeline has one.
    """
    every = names or [[f"rank {rank}" for rank in range(timeline.num_ranks)] for timeline in timelines]
    events = [event for number in range(len(timelines)) for event in _events(timelines, number, every, first_process)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(
    timelines: Sequence[Timeline], number: int, ranks: Sequence[Sequence[str]], first_process: int
) -> Iterator[dict[str, Any]]:
    timeline = timelines[number]
    process = {rank: first_process + rank * len(timelines) + number for rank in range(timeline.num_ranks)}
    for rank, pid in process.items():
        yield _label("process_name", pid, 0, name=f"{ranks[number][rank]}: {timeline.name}")
        yield _label("process_sort_index", pid, 0, sort_index=pid)
    threads = _threads(timeline)
    names = {(rank, thread, label) for rank, thread, label in threads}
    for rank, thread, label in sorted(names):
        yield _label("thread_name", process[rank], thread, name=label)
        yield _label("thread_sort_index", process[rank], thread, sort_index=thread)
    consumers = _consumers(timeline)
    for place, (span, (rank, thread, _)) in enumerate(zip(timeline.spans, threads, strict=True)):
        here = {"pid": process[rank], "tid": thread}
        yield {
            "ph": "X",
            "name": span.label or _name(span.slot),
            "cat": span.lane,
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"action": [str(action) for action in span.slot]},
            **here,
        }
        travels = span.slot and span.slot[0].op in _CONSUMER_OF and span.lane != SEND_LANE
        fed = consumers.get(_consumer_of(span.slot[0])) if travels else None
        if fed is not None:
            arrow = {"name": "transfer", "cat": "transfer", "id": f"{number}.{place}"}
            yield {"ph": "s", "ts": span.start_s * 1e6, **arrow, **here}
            yield {"ph": "f", "bp": "e", "ts": fed.start_s * 1e6, "pid": process[fed.rank], "tid": 0, **arrow}


def _label(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _name(slot: Slot) -> str:
    """Return a span's name; Perfetto ignores its digits when it picks colours, so every forward has the same."""
    return " + ".join(f"{a.op.value}{'' if a.microbatch is None else a.microbatch} s{a.stage}" for a in slot)


def _threads(timeline: Timeline) -> list[tuple[int, int, str]]:
    """(rank, thread, label) of each span; overlapping spans of one lane go to separate threads."""
    free_s: dict[int, dict[tuple[str, int], float]] = {rank: {} for rank in range(timeline.num_ranks)}
    lines: list[tuple[str, int]] = []
    for span in timeline.spans:
        line = 0
        while free_s[span.rank].get((span.lane, line), 0.0) > span.start_s + 1e-12:
            line += 1
        free_s[span.rank][span.lane, line] = span.end_s
        lines.append((span.lane, line))
    numbers = {
        rank: {key: n for n, key in enumerate(sorted(lanes, key=lambda key: (key[0] != COMPUTE_LANE, key)))}
        for rank, lanes in free_s.items()
    }
    return [
        (span.rank, numbers[span.rank][lane, line], lane if line == 0 else f"{lane} ({line + 1})")
        for span, (lane, line) in zip(timeline.spans, lines, strict=True)
    ]


def _consumer_of(send: Action) -> Action:
    op, step = _CONSUMER_OF[send.op]
    return Action(op, send.stage + step, send.microbatch)


def _consumers(timeline: Timeline) -> dict[Action, Span]:
    """Compute spans by action, with an input-gradient backward ``I`` listed as ``B``."""
    return {
        action._replace(op=Op.B if action.op is Op.I else action.op): span
        for span in timeline.spans
        if span.lane == COMPUTE_LANE
        for action in span.slot
        if action.op in COMPUTE and action.op is not Op.W
    }
