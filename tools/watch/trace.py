"""A step as a trace for Perfetto: every rank, its transfers and prefills, and each uplink, measured and predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from weft.engine.observability.event_ring import PREFILL
from weft.pipeline.perfetto import perfetto_trace
from weft.pipeline.timeline import Lane, Span, Timeline
from weft.tools.watch.record import RunRecord
from weft.tools.watch.transfers import Transfer, measured_transfers, predicted_transfers, uplink


def step_trace(record: RunRecord, step: int) -> dict[str, Any]:
    """Return the trace of a recorded step. See `perfetto_trace`."""
    spans = record.spans(step)
    origin_s = float(spans.start_s.min()) if len(spans) else 0.0
    transfers = [
        each._replace(start_s=each.start_s - origin_s, end_s=each.end_s - origin_s)
        for each in measured_transfers(record, spans)
    ]
    added: dict[int, list[Span]] = defaultdict(list)
    for line, span in (*_prefills(record, spans, origin_s), *_sent(record, transfers)):
        added[line].append(span)
    timelines: list[Timeline] = []
    for line, (timeline, prediction) in enumerate(zip(record.timelines(spans), record.predictions, strict=True)):
        timelines += replace(timeline, spans=(*timeline.spans, *added[line])), prediction
    names = [[f"rank {rank}" for rank in ranks] for ranks in record.plan["ranks"] for _ in range(2)]
    trace = perfetto_trace(timelines, names)
    uplinks = {"measured": _uplinks(record, transfers), "predicted": _uplinks(record, predicted_transfers(record))}
    sites = sorted({name for found in uplinks.values() for name in found})
    lanes = [
        Timeline(origin, len(sites), tuple(_lanes(sites, found)), (0.0,) * len(sites), (0,) * len(sites))
        for origin, found in uplinks.items()
    ]
    first = 1 + record.placement.num_ranks * len(timelines)
    trace["traceEvents"] += perfetto_trace(lanes, [[f"WAN {name}" for name in sites]] * 2, first)["traceEvents"]
    return trace


def _prefills(record: RunRecord, spans: pd.DataFrame, origin_s: float) -> Iterator[tuple[int, Span]]:
    for row in spans[spans.section == PREFILL].itertuples():
        if (place := record.places.get(row.rank)) is not None:
            times = row.start_s - origin_s, row.end_s - origin_s
            yield place.line, Span(place.stage, Lane(PREFILL), (), *times, label=row.slot)


def _sent(record: RunRecord, transfers: Iterable[Transfer]) -> Iterator[tuple[int, Span]]:
    for each in transfers:
        place, peer = record.places[each.rank], record.places[each.peer].stage
        lane = Lane.transfer(each.send.op.value[-1], peer)
        yield place.line, Span(place.stage, lane, (each.send,), each.start_s, each.end_s)


def _uplinks(record: RunRecord, transfers: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    found: dict[str, list[Transfer]] = defaultdict(list)
    for each in transfers:
        if name := uplink(record, each):
            found[name].append(each)
    return found


def _lanes(sites: list[str], transfers: dict[str, list[Transfer]]) -> Iterator[Span]:
    """Yield the spans of uplinks, with a lane for each pair of ranks."""
    for number, name in enumerate(sites):
        for each in sorted(transfers.get(name, ()), key=lambda each: each.start_s):
            yield Span(number, Lane(f"{each.rank} → {each.peer}"), (each.send,), each.start_s, each.end_s)
