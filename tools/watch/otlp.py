"""`weft watch RUN --otlp ADDRESS`: send a recorded step to an OpenTelemetry collector, such as Jaeger or Tempo.

A step is a trace: a span of the step, one of each rank below it, and one of each event below its rank. Links follow the
schedule's dependencies, so that a micro-batch can be followed through all ranks.
"""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource  # type: ignore[attr-defined,unused-ignore]
from opentelemetry.sdk.trace import Span, TracerProvider  # type: ignore[attr-defined,unused-ignore]
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult  # type: ignore[attr-defined,unused-ignore]
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import needs_of

BATCH = 512
"""Spans of a request."""


def send(record: RunRecord, exporter: SpanExporter, step: int | None = None) -> tuple[int, int]:
    """Export a recorded step, the newest by default. Return its number and that of the spans.

    Raises:
        ValueError: no step is recorded, or the collector does not take the spans.
    """
    shown = record.step_with_spans(step)
    found = spans(record.of_step(shown), shown)
    if not found:
        raise ValueError(f"{record.folder}: no step is recorded; it takes logging.events=true, and a few steps")
    for first in range(0, len(found), BATCH):
        if exporter.export(found[first : first + BATCH]) is not SpanExportResult.SUCCESS:
            raise ValueError("the collector did not take the spans; check the address and its log")
    return shown, len(found)


def spans(record: RunRecord, step: int) -> tuple[Any, ...]:
    """Return the spans of a recorded step."""
    table, ended = record.spans(step), InMemorySpanExporter()
    whole = table[table.section == "step"]
    if not len(whole):
        return ()
    provider = TracerProvider(
        resource=Resource({"service.name": "weft", "weft.run": record.name}), shutdown_on_exit=False
    )
    provider.add_span_processor(SimpleSpanProcessor(ended))
    tracer = provider.get_tracer("weft")

    def span(name: str, start_s: float, parent: Span | None = None, **attributes: int | str) -> Span:
        under = None if parent is None else trace.set_span_in_context(parent)
        named = {f"weft.{key}": value for key, value in attributes.items()}
        made = tracer.start_span(name, under, attributes=named, start_time=round(start_s * 1e9))
        assert isinstance(made, Span), "the provider samples every span"
        return made

    root = span(f"step {step}", whole.start_s.min(), step=step)
    ranks: dict[int, Span] = {}
    for row in whole.itertuples():
        if (place := record.places.get(row.rank)) is not None:
            ranks[row.rank] = span(
                f"rank {row.rank}", row.start_s, root, rank=row.rank, stage=place.stage, pipeline=place.line
            )
    events = [row for row in table.itertuples() if row.section != "step" and row.rank in ranks]
    made = [
        span(row.slot or row.section, row.start_s, ranks[row.rank], rank=row.rank, section=row.section)
        for row in events
    ]
    by_slot = {(row.rank, row.slot): each for row, each in zip(events, made, strict=True)}
    needs = needs_of(record)
    for row, each in zip(events, made, strict=True):
        for rank, slot in needs[record.places[row.rank].line].get(row.slot, []):
            if (rank, slot) in by_slot:
                each.add_link(by_slot[rank, slot].get_span_context())
        each.end(round(row.end_s * 1e9))
    for row in whole.itertuples():
        if row.rank in ranks:
            ranks[row.rank].end(round(row.end_s * 1e9))
    root.end(round(whole.end_s.max() * 1e9))
    return ended.get_finished_spans()
