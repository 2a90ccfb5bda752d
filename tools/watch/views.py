"""The views of a run as JSON types: what the page and the terminal show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from math import isfinite
from time import monotonic, time
from typing import Any

import pandas as pd

from weft.conf.host.json_records import JsonRecords
from weft.conf.host.terminal import printable
from weft.engine.observability.event_ring import PREFILL
from weft.pipeline.action import slot_text
from weft.pipeline.order import visits_of
from weft.pipeline.timeline import SEND_LANE
from weft.tools.watch.analysis import heat, links, mean_shares, measured_shares, where_time_goes
from weft.tools.watch.connections import connections
from weft.tools.watch.explain import limits
from weft.tools.watch.prometheus import restarts
from weft.tools.watch.record import RunRecord, waits_for
from weft.tools.watch.step_files import files_of
from weft.tools.watch.trace import step_trace
from weft.tools.watch.transfers import Transfer, measured_transfers, predicted_transfers, uplink

LIVE_S = 60.0
"""Seconds without a sign of its collectors after which a run counts as ended."""
EXPLAIN_S = 20.0
"""Seconds between two simulations of what limits the run."""
MOST_ALERTS = 8
"""Newest alerts and faults that are shown."""
MOST_POINTS = 2000
"""Points of a curve. Longer ones are thinned."""


class Views:
    """Views of one run, which is read again as it grows."""

    def __init__(self, record: RunRecord, other: RunRecord | None = None) -> None:
        """Show ``record``, and where its time goes next to ``other``."""
        self._record, self._other = record, other
        self._journal = JsonRecords(record.folder / "supervisor" / "journal.jsonl")
        self._explained: list[dict[str, Any]] = []
        self._explained_at = -EXPLAIN_S
        self._views: dict[str, Callable[..., Any]] = {
            "overview": self._overview,
            "metrics": self._metrics,
            "heat": lambda window, **_: heat(record, window),
            "timeline": self._timeline,
            "ranks": self._ranks,
            "links": self._links,
            "time": self._time,
            "explain": self._explain,
            "perfetto": self._perfetto,
        }

    def show(self, view: str, *, step: int | None = None, window: int = 20, against: int | None = None) -> Any:
        """Return a view.

        Args:
            step: step of the timeline, links and time. None takes the newest.
            window: number of the newest steps that the heat map averages.
            against: step with which time is compared, of the other run if there is one, whose newest is the default.

        Raises:
            KeyError: there is no such view.
        """
        show = self._views[view]
        self._record.refresh()
        return show(step=step, window=window, against=against)

    def changed(self) -> dict[str, Any]:
        """Return values that differ if a view has changed."""
        self._record.refresh()
        now = [[entry["rank"], entry["slot"], entry["step"]] for entry in self._record.current()]
        return {"step": self._record.step_range[1], "records": len(self._record.metrics), "now": now}

    def _overview(self, **_: Any) -> dict[str, Any]:
        record, config = self._record, self._record.config
        training = [entry for entry in record.metrics if entry.get("kind") == "train"]
        last, now = (training[-1] if training else {}), record.current()
        at = max((entry["at"] for entry in now), default=0.0)
        done, steps = int(last.get("step") or record.step_range[1]), int(config["train"]["steps"])
        step_s = last.get("step_seconds")
        is_live = time() - at < LIVE_S and any(entry["alive"] for entry in now)
        return {
            "name": record.name,
            "live": is_live,
            "step": done,
            "steps": steps,
            "left_s": (steps - done) * step_s if step_s and is_live else None,
            "last": last,
            "predicted": record.plan["predicted"],
            "schedule": record.schedules[0].name,
            "microbatches": record.schedules[0].num_microbatches,
            "ranks": len(record.places),
            "stages": record.placement.num_stages,
            "pipelines": record.num_lines,
            "sites": record.site_names,
            "hosts": sorted({entry["host"] for entry in now}),
            "model": config["model"].get("pretrained") or config["model"].get("arch"),
            "zero": config["zero"]["stage"],
            "precision": config["train"]["precision"],
            "log": self._log(),
            **_supervision(self._journal.read()),
        }

    def _log(self) -> list[str]:
        """Return the last lines of rank 0's log of a run that an agent started."""
        found = sorted(
            files_of(self._record.folder / "supervisor" / "logs", "**/*.log"), key=lambda path: path.stat().st_mtime
        )
        lines: list[str] = []
        for path in found[-4:]:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                lines += file.read(4096).decode(errors="replace").splitlines()[-8:]
        return lines[-8:]

    def _metrics(self, **_: Any) -> dict[str, list[Any]]:
        training = [entry for entry in self._record.metrics if entry.get("kind") == "train"]
        chosen = training[:: max(1, len(training) // MOST_POINTS)]
        if training and chosen[-1] is not training[-1]:
            chosen.append(training[-1])
        names = (
            "step",
            "loss",
            "step_seconds",
            "tokens_per_second",
            "mfu",
            "bubble_share",
            "peak_memory_gb",
            "grad_norm",
        )
        return {name: [entry.get(name) for entry in chosen] for name in names}

    def _timeline(self, step: int | None, **_: Any) -> dict[str, Any]:
        record = self._record
        shown = record.step_with_spans(step)
        record = record.of_step(shown)
        spans = record.spans(shown)
        origin = float(spans.start_s.min()) if len(spans) else 0.0
        end = float(spans[spans.section == "step"].end_s.max()) if len(spans) else 0.0
        spans = spans[(spans.section == "step") | (spans.start_s < end)]  # the rest is between this step and the next
        rows = [
            [int(row.rank), row.section, row.slot, row.start_s - origin, row.end_s - origin]
            for row in spans[spans.section != "step"].itertuples()
        ]
        return {
            "step": shown,
            "step_s": end - origin,
            "spans": [row for row in rows if row[1] != PREFILL],
            "prefills": [row for row in rows if row[1] == PREFILL and row[0] in record.places],
            "transfers": _transfers(record, measured_transfers(record, spans), origin),
            "predicted_transfers": _transfers(record, predicted_transfers(record)),
            "predicted_step_s": max(timeline.step_s for timeline in record.predictions),
            "predicted": [
                [record.plan["ranks"][line][s.rank], s.lane, slot_text(s.slot), s.start_s, s.end_s]
                for line, timeline in enumerate(record.predictions)
                for s in timeline.spans
                if s.lane != SEND_LANE and s.lane.peer is None
            ],
            "needs": needs_of(record),
            "clocks": _clocks(record, spans),
            "timer_share": _timer_share(record, spans),
        }

    def _ranks(self, **_: Any) -> list[dict[str, Any]]:
        record = self._record
        now = {entry["rank"]: entry for entry in record.current()}
        found = []
        for rank, place in sorted(record.places.items()):
            entry = now.get(rank, {})
            slot = str(entry.get("slot", ""))
            found.append(
                {
                    "rank": rank,
                    "stage": place.stage,
                    "pipeline": place.line,
                    "site": record.site_name(rank),
                    "stages": place.stages,
                    "host": entry.get("host", ""),
                    "alive": bool(entry.get("alive")),
                    "slot": slot,
                    "step": entry.get("step", 0),
                    "since": entry.get("since"),
                    "waits_for": waits_for(record, rank, slot),
                }
            )
        return found

    def _perfetto(self, step: int | None, **_: Any) -> dict[str, Any]:
        shown = self._record.step_with_spans(step)
        return step_trace(self._record.of_step(shown), shown)

    def _links(self, step: int | None, **_: Any) -> dict[str, Any]:
        shown = self._record.step_with_spans(step)
        record = self._record.of_step(shown)
        hops = links(record, record.spans(shown))
        return {"step": shown, "hops": hops, "connections": connections(self._record)}

    def _time(self, step: int | None, against: int | None, **_: Any) -> dict[str, Any]:
        shown = self._record.step_with_spans(step)
        compared: dict[str, Any] | None = None
        if self._other is not None or against is not None:
            record = self._other or self._record
            number = record.step_with_spans(against)
            if seconds := mean_shares(measured_shares(record.of_step(number), record.spans(number))):
                compared = {"name": record.name, "step": number, "seconds": seconds}
        own = self._record.of_step(shown)
        found = where_time_goes(own, own.spans(shown), compared and compared["seconds"])
        return {"step": shown, "against": compared, **found}

    def _explain(self, **_: Any) -> list[dict[str, Any]]:
        """Return the limits, which are simulated again only from time to time."""
        if monotonic() - self._explained_at > EXPLAIN_S:
            with suppress(ValueError):  # no step is recorded yet
                self._explained = [
                    {"kind": each.kind, "gain": each.gain, "text": each.text} for each in limits(self._record)
                ]
            self._explained_at = monotonic()
        return self._explained


def _supervision(journal: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of restarts, and the newest faults and alerts in words, with the time of day."""
    told = [each for each in journal if each.get("event") in ("fault", "alert")]
    names = ("at", "event", "kind", "culprit", "evidence")
    return {
        "restarts": restarts(journal),
        "alerts": [{name: printable(str(each.get(name, ""))) for name in names} for each in told[-MOST_ALERTS:]],
    }


def _clocks(record: RunRecord, spans: pd.DataFrame) -> dict[str, Any]:
    """Return the number of hosts, the largest error of clocks after they were lined up, and hosts that were not."""
    clocks = record.clocks(spans)
    bounds = [clock.bound_s for clock in clocks.values() if isfinite(clock.bound_s)]
    unknown = [host for host, clock in clocks.items() if not isfinite(clock.bound_s)]
    return {"hosts": len(clocks), "bound_s": max(bounds, default=0.0), "unknown": unknown}


def _timer_share(record: RunRecord, spans: pd.DataFrame) -> float | None:
    """Return the largest part of a rank's step that timing its events took, or None if no rank stated the cost."""
    event_s = {entry["rank"]: entry.get("event_s") or 0.0 for entry in record.current()}
    whole = spans[spans.section == "step"].groupby("rank")
    step_s = (whole.end_s.max() - whole.start_s.max()).to_dict()
    counts = spans[spans.section != PREFILL].groupby("rank").size().to_dict()
    shares = [
        counts[rank] * event_s[rank] / step_s[rank] for rank in step_s if event_s.get(rank) and step_s[rank] > 0.0
    ]
    return max(shares, default=None)


def _transfers(record: RunRecord, transfers: Iterable[Transfer], origin_s: float = 0.0) -> list[list[Any]]:
    return [
        [t.rank, t.peer, uplink(record, t), str(t.send), t.start_s - origin_s, t.end_s - origin_s, t.is_exact]
        for t in transfers
    ]


def needs_of(record: RunRecord) -> list[dict[str, list[list[Any]]]]:
    """Return for each line and slot the slots that produce its inputs, each with its rank."""
    found = []
    for line, schedule in enumerate(record.schedules):
        ranks = record.plan["ranks"][line]
        makers: dict[Any, tuple[int, str]] = {}
        visits = [visit for row in visits_of(schedule) for visit in row]
        for visit in visits:
            for action in visit.slot:
                makers[action] = ranks[visit.rank], slot_text(visit.slot)
                if action.op.value == "B":
                    for op in ("I", "W"):
                        makers[type(action)(type(action.op)(op), action.stage, action.microbatch)] = makers[action]
        found.append(
            {slot_text(visit.slot): [list(makers[need]) for need in visit.needs if need in makers] for visit in visits}
        )
    return found
