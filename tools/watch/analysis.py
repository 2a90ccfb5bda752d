"""Where a run's time goes, which ranks deviate from their class, and how fast its links are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from weft.pipeline.action import COMPUTE, Action, Op, Slot, parse_slot
from weft.pipeline.dependencies import establishes
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import Timeline
from weft.tools.watch.deviations import HIGH, LOW, least_share, lower_median
from weft.tools.watch.outliers import LABELS, WARM_UP, WINDOW, Window, outliers, pauses
from weft.tools.watch.record import COMPUTE_SECTIONS, RunRecord, producer_of
from weft.tools.watch.step_files import INSIDE
from weft.tools.watch.transfers import measured_transfers

LEAST_STEPS = 6
"""Steps with an exact transfer of a hop from which it is compared with others."""
CATEGORIES = ("compute", "optimiser", "exposed transfers", "exposed collectives", "bubbles", "data", "other")


def heat(record: RunRecord, window: int = WINDOW) -> dict[str, Any]:
    """Return the mean seconds of every rank and section over the last steps, with deviations from the rank's class.

    Ranks without peers of their stage (``alone``) are compared with all ranks.
    """
    begun, newest = record.step_range
    first = min(max(begun + WARM_UP, newest - window + 1), newest)
    recent_first = min(max(begun + WARM_UP, newest - WINDOW + 1), newest)
    recent = record.steps.window(recent_first, newest, (*LABELS, INSIDE))
    of_map = slice(max(0, first - recent_first), None)
    seconds, counts = recent.seconds[of_map, :, :-1].sum(axis=0), recent.is_recorded[of_map].sum(axis=0)
    if first < recent_first:
        earlier = record.steps.totals(first, recent_first - 1, tuple(LABELS))
        seconds, counts = seconds + earlier.seconds, counts + earlier.is_recorded.sum(axis=0)
    is_shown = counts > 0
    ranks, counts = recent.ranks[is_shown], counts[is_shown]
    if not len(ranks):
        return {
            "first": 0,
            "last": 0,
            "sections": [],
            "ranks": [],
            "mean_s": [],
            "deviation": [],
            "groups": {},
            "outliers": [],
            "pauses": [],
        }
    means = seconds[is_shown] / counts[:, None]
    shown = np.flatnonzero((means > 0).any(axis=0))
    means, sections = means[:, shown], [recent.sections[number] for number in shown]
    reference, alone = np.broadcast_to(lower_median(means.T), means.shape).copy(), np.full(len(ranks), True)
    for group in record.classes:
        places = np.flatnonzero(np.isin(ranks, group))
        if len(group) > 1 and len(places):
            reference[places], alone[places] = lower_median(means[places].T), False
    judged = Window(record, recent)
    deviation = np.where(reference > 1e-9, means / np.maximum(reference, 1e-9) - 1.0, 0.0)
    return {
        "first": first,
        "last": newest,
        "sections": [{"name": name, "label": LABELS[name]} for name in sections],
        "ranks": ranks.tolist(),
        "mean_s": means.round(9).tolist(),
        "deviation": deviation.round(4).tolist(),
        "alone": alone.tolist(),
        "groups": _groups(record, ranks.tolist()),
        "outliers": [
            {"rank": o.rank, "section": o.section, "text": o.text(record)} for o in outliers(record, recent=judged)
        ],
        "pauses": [each.text() for each in pauses(record, judged)],
    }


def _groups(record: RunRecord, ranks: Sequence[int]) -> dict[str, list[str]]:
    """Return the host, site, stage and pipeline of ranks, by which the heat map groups them."""
    hosts = {entry["rank"]: str(entry["host"]) for entry in record.current()}
    places = [record.places[rank] for rank in ranks]
    return {
        "host": [hosts.get(rank, "unknown host") for rank in ranks],
        "site": [record.site_name(rank) for rank in ranks],
        "stage": [f"stage {place.stage}" for place in places],
        "pipeline": [f"pipeline {place.line}" for place in places],
    }


def _overlap(start: float, end: float, intervals: Iterable[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in intervals)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _ends(timeline: Timeline) -> dict[tuple[int, Action], float]:
    """Return the end of each result of a computation by rank and fact."""
    return {
        (rank, fact): span.end_s
        for rank, row in enumerate(timeline.compute)
        for span in row
        for action in span.slot
        for fact in establishes(action)
    }


def _produced_s(schedule: Schedule, slot: Slot, ends: Mapping[tuple[int, Action], float]) -> float | None:
    """Return when the last input from another rank of a slot had been computed, or None without such an input."""
    producers = [producer_of(schedule, action) for action in slot]
    known = [ends[producer] for producer in producers if producer is not None and producer in ends]
    return max(known) if known else None


def _waits(record: RunRecord, spans: pd.DataFrame) -> dict[int, list[tuple[float, float, float]]]:
    """Return for each rank its waits for collectives in a step: start, end, and the arrival of the last member.

    All members of a group enter equally often. If they have not, the members are taken as arrived.
    """
    whole = spans[spans.section == "step"].groupby("rank")[["start_s", "end_s"]].max()
    every, alike = [tuple(record.places)], sorted(record.classes)
    found = defaultdict(list)
    for section, members in (("sums", every), ("gradients", alike), ("weights", alike)):
        waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row in spans[spans.section == section].itertuples():
            if row.rank in whole.index and whole.start_s[row.rank] <= row.start_s < whole.end_s[row.rank]:
                waits[row.rank].append((row.start_s, row.end_s))
        for group in members:
            rows = [waits[rank] for rank in group]
            are_alike = len(set(map(len, rows))) == 1
            for rank, own in zip(group, rows, strict=True):
                for number, (start, end) in enumerate(own):
                    arrived = max(other[number][0] for other in rows) if are_alike else start
                    found[rank].append((start, end, min(arrived, end)))
    return found


def measured_shares(record: RunRecord, spans: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Return the seconds of each category for each rank in a step.

    A wait for a transfer is a bubble until its producer on the other rank has finished, and exposed afterwards. So is a
    wait for a collective until its last member has arrived.
    """
    origin = float(spans.start_s.min()) if len(spans) else 0.0
    timelines, found = record.timelines(spans), {}
    ends, collectives = [_ends(timeline) for timeline in timelines], _waits(record, spans)
    for rank, rows in spans.groupby("rank"):
        place = record.places.get(int(rank))
        whole = rows[rows.section == "step"]
        if place is None or not len(whole):
            continue
        rows = rows.assign(start_s=rows.start_s - origin, end_s=rows.end_s - origin)

        def of(*names: str, rows: pd.DataFrame = rows) -> list[tuple[float, float]]:
            chosen = rows[rows.section.isin(names)]
            return list(zip(chosen.start_s, chosen.end_s, strict=True))

        step_s = float(whole.end_s.iloc[-1] - whole.start_s.iloc[-1])
        waits = [(start - origin, end - origin) for start, end, _ in collectives[int(rank)]]
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        computing = _union(of(*COMPUTE_SECTIONS))
        inside = sum(_overlap(start, end, waits) for start, end in computing)
        seconds["compute"] = sum(end - start for start, end in computing) - inside
        stepping = of("STEP")
        seconds["optimiser"] = sum(end - start - _overlap(start, end, waits) for start, end in stepping)
        seconds["exposed collectives"] = sum(end - arrived for _, end, arrived in collectives[int(rank)])
        seconds["bubbles"] = sum(arrived - start for start, _, arrived in collectives[int(rank)])
        seconds["data"] = sum(end - start for start, end in of("data"))
        seconds["exposed transfers"] = sum(end - start for start, end in of("SEND_F", "SEND_B"))
        schedule = record.schedules[place.line]
        for row in rows[rows.section.isin(["RECV_F", "RECV_B"])].itertuples():
            action = parse_slot(row.slot)[0]
            user = Action(Op.F if action.op is Op.RECV_F else Op.I, action.stage, action.microbatch)
            produced_s = _produced_s(schedule, (user,), ends[place.line])
            exposed = row.end_s - max(row.start_s, min(produced_s if produced_s is not None else row.end_s, row.end_s))
            seconds["exposed transfers"] += exposed
            seconds["bubbles"] += row.end_s - row.start_s - exposed
        seconds["other"] = max(0.0, step_s - sum(seconds.values()))
        found[int(rank)] = seconds | {"step": step_s}
    return found


def predicted_shares(schedule: Schedule, timeline: Timeline) -> dict[str, float]:
    """Return the mean seconds of each category of a predicted timeline over its ranks."""
    seconds, ends = dict.fromkeys(CATEGORIES, 0.0), _ends(timeline)
    for row in timeline.compute:
        free_s = 0.0
        for span in row:
            name = "compute" if span.slot[0].op in COMPUTE else "optimiser"
            seconds[name] += span.end_s - span.start_s
            gap = max(0.0, span.start_s - free_s)
            produced_s = _produced_s(schedule, span.slot, ends) if name == "compute" else None
            exposed = max(0.0, span.start_s - max(free_s, produced_s)) if produced_s is not None else 0.0
            seconds["exposed transfers"] += min(exposed, gap)
            seconds["bubbles"] += gap - min(exposed, gap)
            free_s = max(free_s, span.end_s)
        seconds["bubbles"] += timeline.step_s - free_s
    count = timeline.num_ranks
    return {name: value / count for name, value in seconds.items()} | {"step": timeline.step_s}


def where_time_goes(
    record: RunRecord, spans: pd.DataFrame, against: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return the mean seconds of each category over all ranks, measured in one step and predicted.

    Args:
        against: `mean_shares` of another step or run. If it is given, categories are ordered by the difference to it,
            otherwise to the prediction.
    """
    shares = measured_shares(record, spans)
    measured, predicted = mean_shares(shares), predicted_shares(record.schedules[0], record.predictions[0])
    other = against or predicted
    differences = sorted(CATEGORIES, key=lambda name: -abs(measured.get(name, 0.0) - other[name]))
    return {"measured": measured, "predicted": predicted, "order": differences, "ranks": shares}


def mean_shares(shares: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each category over ranks, or nothing without any rank."""
    names = (*CATEGORIES, "step")
    return {name: float(np.mean([s[name] for s in shares.values()])) for name in names} if shares else {}


Hop = tuple[int, int, str]
"""Sending and receiving rank of transfers, and their contents: activations or gradients."""


def links(record: RunRecord, spans: pd.DataFrame) -> list[dict[str, Any]]:
    """Return `hops` of a step's spans."""
    return hops(record, [transfers_by_hop(record, spans)])


def hops(record: RunRecord, steps: Sequence[Mapping[Hop, Sequence[tuple[float, bool]]]]) -> list[dict[str, Any]]:
    """Return each hop with the fastest and the median transfer of some steps, and what the plan expects.

    ``exact`` counts the exact ones (`Transfer`), which alone decide the fastest if there are any.

    Args:
        steps: transfers of each step. See `transfers_by_hop`.
    """
    every: dict[Hop, list[tuple[float, bool]]] = defaultdict(list)
    for sent in steps:
        for hop, transfers in sent.items():
            every[hop] += transfers
    return [_hop(record, *hop, transfers) for hop, transfers in sorted(every.items())]


def transfers_by_hop(record: RunRecord, spans: pd.DataFrame) -> dict[Hop, list[tuple[float, bool]]]:
    """Return the seconds of each hop's transfers in a step's spans, and whether they are exact."""
    sent: dict[Hop, list[tuple[float, bool]]] = defaultdict(list)
    for each in measured_transfers(record, spans):
        kind = "activations" if each.send.op is Op.SEND_F else "gradients"
        sent[each.rank, each.peer, kind].append((each.end_s - each.start_s, each.is_exact))
    return sent


def slow_hops(
    record: RunRecord, steps: Sequence[Mapping[Hop, Sequence[tuple[float, bool]]]]
) -> dict[Hop, tuple[float, float]]:
    """Return the hops that are slower than those of the same stages in other pipelines, with mean seconds of both.

    As for ranks, quantiles over steps are compared with the lower median of the hops: LOW finds what is always slower,
    and HIGH what is slower in some steps.

    Args:
        steps: transfers of each step. See `transfers_by_hop`.
    """
    alike: dict[tuple[object, ...], dict[Hop, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sent in steps:
        for (rank, peer, kind), transfers in sent.items():
            here, there = record.places[rank], record.places[peer]
            if exact := [seconds for seconds, is_exact in transfers if is_exact]:
                alike[here.stage, there.stage, here.site, there.site, kind][rank, peer, kind].append(median(exact))
    found: dict[Hop, tuple[float, float]] = {}
    for alternatives in alike.values():
        known = {hop: np.array(seconds) for hop, seconds in alternatives.items() if len(seconds) >= LEAST_STEPS}
        means = {hop: float(seconds.mean()) for hop, seconds in known.items()}
        for at in (LOW, HIGH) if len(known) > 1 else ():
            below, usual, above = np.array([np.quantile(s, (at - 0.15, at, at + 0.15)) for s in known.values()]).T
            expected, count = float(lower_median(usual)), min(map(len, known.values()))
            if expected > 0:
                least = least_share(np.median(above - below) / expected, count)
                slow = [hop for hop, seconds in zip(known, usual, strict=True) if seconds / expected - 1 > least]
                others_s = float(lower_median(np.array(list(means.values()))))
                found |= {hop: (means[hop], others_s) for hop in slow}
    return found


def _hop(record: RunRecord, rank: int, peer: int, kind: str, transfers: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    here, there = record.places[rank], record.places[peer]
    link = record.costs.link(here.site, there.site)
    num_bytes = max(record.costs.stages[stage].output_bytes for stage in here.stages)
    exact = [seconds for seconds, is_exact in transfers if is_exact]
    fastest = min(exact or [seconds for seconds, _ in transfers])
    return {
        "from": rank,
        "to": peer,
        "kind": kind,
        "crosses": here.site != there.site,
        "transfers": len(transfers),
        "exact": len(exact),
        "fastest_s": fastest,
        "median_s": median(seconds for seconds, _ in transfers),
        "bytes": num_bytes,
        "mbps": num_bytes * 8e-6 / fastest if fastest > 0 else None,
        "planned_s": link.transit_s(num_bytes) + link.latency_s,
    }
