"""Where a run's time goes, which ranks deviate from their class, and how fast its links are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from weft.pipeline.action import COMPUTE, Action, Op, Slot, parse_slot, receive_of
from weft.pipeline.dependencies import establishes
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import Timeline
from weft.tools.watch.record import COMPUTE_SECTIONS, RunRecord, producer_of

LABELS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "SEND_F": "send activations",
    "SEND_B": "send gradients",
    "RECV_F": "wait for activations",
    "RECV_B": "wait for gradients",
    "REDUCE_GRAD": "start reductions",
    "UNSHARD": "gather weights",
    "STEP": "optimiser",
    "data": "read data",
    "gradients": "wait for reductions",
    "weights": "wait for weights",
    "sums": "wait for small sums",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "step": "whole step",
}
"""Sections in words, in the order of the heat map."""
CATEGORIES = ("compute", "optimiser", "exposed transfers", "exposed collectives", "bubbles", "data", "other")
WARM_UP = 2
"""First steps of a run, which are left out: memory is allocated and kernels are loaded."""
WINDOW = 20
"""Steps after which a deviation is judged."""
OWN = ("compute", "data", "SEND_F", "SEND_B")
"""Work of a rank itself. The rest are waits, which others cause."""
LEAST_DEVIATION = 0.05
LEAST_SHARE = 0.01
"""Share of a step below which a deviation has no effect worth a name."""
LEAST_SIGMAS = 6.0
LOW = 0.3
"""Quantile of a section's seconds over the steps that is compared: other processes of a host make some steps longer."""
SIGMA_OF_SPREAD = 1.45
"""Standard error of that quantile for one step, in units of the distance between the quantiles LOW - 0.15 and
LOW + 0.15."""
LEAST_STEADY = 0.8
"""Share of the steps in which an outlier exceeds half of its deviation."""


def per_step(record: RunRecord, first: int, last: int) -> pd.DataFrame:
    """Return the seconds of each section (columns) by step and rank, summed over stages."""
    steps = record.steps
    chosen = steps[(steps.step >= first) & (steps.step <= last)]
    keys = [chosen.step, chosen["rank"], chosen.section]
    total = (chosen["count"] * chosen.mean_s).groupby(keys, observed=True).sum()
    return total.unstack(fill_value=0.0) if len(chosen) else pd.DataFrame()


def classes(record: RunRecord) -> dict[int, tuple[int, ...]]:
    """Return each rank's class: the ranks of the same pipeline stage."""
    by_stage = defaultdict(list)
    for place in record.places.values():
        by_stage[place.stage].append(place.rank)
    return {rank: tuple(ranks) for ranks in by_stage.values() for rank in ranks}


def _lower_median(values: np.ndarray) -> np.ndarray:
    """Return the lower median over the last axis: a fault makes ranks slower, and never faster."""
    return np.sort(values, axis=-1)[..., (values.shape[-1] - 1) // 2]


def _own_work(record: RunRecord, first: int, last: int) -> pd.DataFrame:
    table = per_step(record, first, last)
    if not len(table):
        return table
    table.columns = table.columns.astype(str)
    table["compute"] = table[[name for name in COMPUTE_SECTIONS if name in table]].sum(axis=1)
    return table


@dataclass(frozen=True)
class Deviation:
    """A section of a rank that is slower than its class.

    Attributes:
        share: by how much it is slower, as a share of its class's time.
        lost_s: seconds of a step that this costs the rank.
    """

    rank: int
    section: str
    share: float
    lost_s: float
    reference: str

    def text(self, record: RunRecord) -> str:
        """Describe the deviation in words."""
        place, what = record.places[self.rank], LABELS.get(self.section, self.section)
        where = f"rank {self.rank} (stage {place.stage}, pipeline {place.line})"
        return f"{where}: {what} takes {self.share:.0%} longer than {self.reference}, {self.lost_s * 1e3:.1f} ms a step"


def outliers(record: RunRecord, last: int | None = None, window: int = WINDOW) -> list[Deviation]:
    """Return the ranks that are slower than their class over a window of steps, the worst first.

    The reference is the lower median of the rank's class. A rank without peers is compared with its own first steps,
    or, where a file has measured costs (``pipeline.costs_file``), with the other ranks by these costs.

    Args:
        last: last step of the window. None means the newest.
    """
    begun, newest = record.step_range
    last = newest if last is None else last
    table = _own_work(record, max(begun + WARM_UP, last - window + 1), last)
    if not len(table) or table.index.get_level_values(0).nunique() < window // 2:
        return []
    step_s, groups, found = float(table["step"].median()), classes(record), []
    for section in OWN:
        if section not in table:
            continue
        wide = table[section].unstack().dropna(axis=1, how="all")
        quantiles = wide.quantile([LOW - 0.15, LOW, LOW + 0.15])
        usual = quantiles.loc[LOW]
        for group in set(groups.values()):
            peers = [rank for rank in group if rank in wide]
            reference = float(_lower_median(usual[peers].to_numpy())) if len(peers) > 1 else 0.0
            for rank in peers:
                expected, name = reference, f"its class of {len(peers)} ranks"
                if len(peers) < 2:
                    expected, name = _alone(record, usual, rank, section, (begun + WARM_UP, last - window))
                if expected <= 0:
                    continue
                seconds, share = wide[rank].dropna().to_numpy(), float(usual[rank]) / expected - 1.0
                spread = float(quantiles[rank].iloc[2] - quantiles[rank].iloc[0]) / expected
                is_steady = float((seconds > expected * (1 + share / 2)).mean()) >= LEAST_STEADY
                is_clear = share > max(LEAST_DEVIATION, LEAST_SIGMAS * SIGMA_OF_SPREAD * spread / np.sqrt(len(seconds)))
                if is_clear and is_steady and share * expected > LEAST_SHARE * step_s:
                    found.append(Deviation(int(rank), section, share, share * expected, name))
    return sorted(found, key=lambda each: -each.lost_s)


def _alone(record: RunRecord, usual: pd.Series, rank: int, section: str, before: tuple[int, int]) -> tuple[float, str]:
    """Return the expected seconds of a section of a rank without peers, or 0, and their origin in words.

    Args:
        usual: measured seconds of all ranks.
        before: steps before the window.
    """
    if section == "compute" and record.config["pipeline"].get("costs_file") and len(usual) > 2:
        places = [record.places[each] for each in usual.index]
        planned = np.array([record.predictions[place.line].busy_s[place.stage] for place in places])
        pace = float(np.median(usual.to_numpy() / planned))
        return pace * float(planned[list(usual.index).index(rank)]), "its costs, at the pace of the other ranks"
    first, last = before[0], min(before[1], before[0] + WINDOW - 1)
    if last - first + 1 < WINDOW // 2:
        return 0.0, ""
    earlier = _own_work(record, first, last)
    own = earlier[section].unstack() if section in earlier else pd.DataFrame()
    return (float(own[rank].quantile(LOW)), f"in steps {first} to {last}") if rank in own else (0.0, "")


def heat(record: RunRecord, window: int = WINDOW) -> dict[str, Any]:
    """Return the mean seconds of every rank and section over the last steps, with deviations from the rank's class.

    Ranks without peers of their stage (``alone``) are compared with all ranks.
    """
    begun, newest = record.step_range
    first = min(max(begun + WARM_UP, newest - window + 1), newest)
    table = per_step(record, first, newest)
    if not len(table):
        return {"first": 0, "last": 0, "sections": [], "ranks": [], "mean_s": [], "deviation": [], "outliers": []}
    table.columns = table.columns.astype(str)
    means = table.groupby(level=1).mean()
    sections = [name for name in LABELS if name in means and (means[name] > 0).any()]
    means, groups = means[sections], classes(record)
    alone = [len(groups.get(rank, ())) < 2 for rank in means.index]
    everyone = tuple(means.index)
    peers = [everyone if is_alone else groups[rank] for rank, is_alone in zip(means.index, alone, strict=True)]
    reference = {
        ranks: _lower_median(means.loc[[rank for rank in ranks if rank in means.index]].to_numpy().T)
        for ranks in set(peers)
    }
    deviations = [
        np.where(reference[ranks] > 1e-9, row / np.maximum(reference[ranks], 1e-9) - 1.0, 0.0)
        for row, ranks in zip(means.to_numpy(), peers, strict=True)
    ]
    return {
        "first": first,
        "last": newest,
        "sections": [{"name": name, "label": LABELS[name]} for name in sections],
        "ranks": [int(rank) for rank in means.index],
        "mean_s": means.to_numpy().tolist(),
        "deviation": [row.round(4).tolist() for row in deviations],
        "alone": alone,
        "outliers": [{"rank": o.rank, "section": o.section, "text": o.text(record)} for o in outliers(record)],
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
    every, alike = [tuple(record.places)], sorted(set(classes(record).values()))
    found = defaultdict(list)
    for section, groups in (("sums", every), ("gradients", alike), ("weights", alike)):
        waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row in spans[spans.section == section].itertuples():
            if row.rank in whole.index and whole.start_s[row.rank] <= row.start_s < whole.end_s[row.rank]:
                waits[row.rank].append((row.start_s, row.end_s))
        for group in groups:
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


def where_time_goes(record: RunRecord, spans: pd.DataFrame) -> dict[str, Any]:
    """Return the mean seconds of each category over all ranks, measured in one step and predicted."""
    shares = measured_shares(record, spans)
    names = (*CATEGORIES, "step")
    measured = {name: float(np.mean([s[name] for s in shares.values()])) for name in names} if shares else {}
    predicted = predicted_shares(record.schedules[0], record.predictions[0])
    differences = sorted(CATEGORIES, key=lambda name: -abs(measured.get(name, 0.0) - predicted[name]))
    return {"measured": measured, "predicted": predicted, "order": differences, "ranks": shares}


def links(record: RunRecord, spans: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each hop with the fastest and the median transfer of a step, and what the plan expects.

    A transfer lasts from the start of its send until the receiver has it. This is exact where the receiver waited
    already, and otherwise an upper bound. ``exact`` counts the former, which alone decide the fastest if there are any.
    """
    sent: dict[tuple[int, int, str], list[tuple[float, bool]]] = defaultdict(list)
    received: dict[tuple[int, Action], tuple[float, float]] = {}
    for row in spans[spans.section.isin(["RECV_F", "RECV_B"])].itertuples():
        if row.rank in record.places:
            received[record.places[row.rank].line, parse_slot(row.slot)[0]] = row.start_s, row.end_s
    for row in spans[spans.section.isin(["SEND_F", "SEND_B"])].itertuples():
        place = record.places.get(row.rank)
        if place is None:
            continue
        receive = receive_of(parse_slot(row.slot)[0])
        peer = record.plan["ranks"][place.line][record.placement.stage_ranks[receive.stage]]
        if (place.line, receive) in received:
            begun, ended = received[place.line, receive]
            key = int(row.rank), int(peer), "F" if row.section == "SEND_F" else "B"
            sent[key].append((max(0.0, ended - row.start_s), begun <= row.start_s))
    return [_hop(record, *key, transfers) for key, transfers in sorted(sent.items())]


def _hop(record: RunRecord, rank: int, peer: int, kind: str, transfers: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    here, there = record.places[rank], record.places[peer]
    link = record.costs.link(here.site, there.site)
    num_bytes = max(record.costs.stages[stage].output_bytes for stage in here.stages)
    exact = [seconds for seconds, is_exact in transfers if is_exact]
    fastest = min(exact or [seconds for seconds, _ in transfers])
    return {
        "from": rank,
        "to": peer,
        "kind": "activations" if kind == "F" else "gradients",
        "crosses": here.site != there.site,
        "transfers": len(transfers),
        "exact": len(exact),
        "fastest_s": fastest,
        "median_s": median(seconds for seconds, _ in transfers),
        "bytes": num_bytes,
        "mbps": num_bytes * 8e-6 / fastest if fastest > 0 else None,
        "planned_s": link.transit_s(num_bytes) + link.latency_s,
    }
