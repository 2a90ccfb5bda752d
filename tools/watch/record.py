"""A run's record: plan, metrics and events, read from its folder while it runs or afterwards."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from weft.conf.host.documents import parse_json, read_text, read_yaml
from weft.conf.host.json_records import JsonRecords
from weft.conf.host.terminal import printable
from weft.pipeline.action import Action, Op, parse_slot, receive_of
from weft.pipeline.cell import pipeline_of, predict
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.timeline import MEASURED_LANES, Span, Timeline
from weft.tools.watch import FOLDER
from weft.tools.watch.clocks import Clock, line_up
from weft.tools.watch.step_files import StepFiles, file_number, files_of, host_of

T = TypeVar("T")
MOST_BYTES = 2**20
COMPUTE_SECTIONS = ("F", "B", "I", "W")
_DAMAGED = (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, ValueError)
"""Errors of a file that is not of this Weft."""
EARLIER = re.compile(r"plan-until-(\d{1,18})\.json")
"""Names of earlier plans, by the last step that ran them."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its pipeline (line), its pipeline rank (stage), its site and its virtual stages."""

    rank: int
    line: int
    stage: int
    site: int
    stages: tuple[int, ...]


class RunRecord:
    """The record of a run so far. `refresh` reads new entries.

    Attributes:
        steps: the seconds of sections by step and rank. See `weft.tools.watch.collector`.
        metrics: records of ``metrics.jsonl``.
    """

    def __init__(self, folder: Path) -> None:
        """Read the run in ``folder``. Raise ValueError if there is no run, or it has no plan yet."""
        self.folder = folder.expanduser().absolute()
        try:
            self.config: dict[str, Any] = printable(read_yaml(self._file("config.yaml"), most_bytes=MOST_BYTES))
            self._plan_written_ns = self._file("plan.json").stat().st_mtime_ns
            self.plan: dict[str, Any] = printable(parse_json(read_text(self._file("plan.json"))))
            self._read_plan()
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder}: no {error} there; name the folder of a run, such as runs/quickstart, after it has started"
            ) from error
        except _DAMAGED as error:
            raise ValueError(f"{folder}: its config.yaml or plan.json is not of this Weft ({error!r})") from error
        self._metrics = JsonRecords(self.folder / "metrics.jsonl")
        self.metrics: list[dict[str, Any]] = []
        self.steps = StepFiles(self.folder / FOLDER, list(self.places))
        self._earlier: dict[Path, RunRecord] = {}
        self.refresh()

    def _file(self, name: str) -> Path:
        if not (self.folder / name).exists():
            raise FileNotFoundError(name)
        return self.folder / name

    def _read_plan(self) -> None:
        plan = self.plan
        shape = plan["placement"]
        self.placement = Placement(tuple(shape["groups"]), shape["legs"], tuple(shape["sites"]))
        self.costs = _costs(plan["costs"], plan.get("collectives"))
        self._measured_costs = [_costs(tree, plan.get("collectives")) for tree in plan.get("measured_costs", ())]
        if any(sum(line) > len(ranks) for line, ranks in zip(plan["sites"], plan["ranks"], strict=True)):
            raise ValueError("its sites have more ranks than its pipelines")
        sites = [[number for number, size in enumerate(line) for _ in range(size)] for line in plan["sites"]]
        self.places = {
            rank: Place(rank, line, stage, sites[line][stage], tuple(self.placement.rank_stages[stage]))
            for line, ranks in enumerate(plan["ranks"])
            for stage, rank in enumerate(ranks)
        }
        self.site_names = [site.get("name") or str(number) for number, site in enumerate(_sites(self.config))]

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.config["train"]["name"])

    @property
    def num_lines(self) -> int:
        """Number of pipelines."""
        return len(self.plan["ranks"])

    def site_name(self, rank: int) -> str:
        """Return the name of a rank's site."""
        site = self.places[rank].site
        return self.site_names[site] if site < len(self.site_names) else str(site)

    def cell(self, line: int = 0) -> Schedule:
        """Return the schedule of a line's DP-cell, with the line's sites."""
        member = self.plan["members"][line]
        found = self.plan["schedules"][member.get("schedule", str(member["pipelines"]))]
        placement = replace(self.placement, sites=tuple(self.plan["sites"][line]), pipelines=member["pipelines"])
        rows = tuple(tuple(parse_slot(text) for text in row.split()) for row in found["rows"])
        return Schedule(found["name"], placement, found["num_microbatches"], rows)

    def _by_kind(self, make: Callable[[int], T]) -> list[T]:
        """Return a value for each line, made once for lines of equal DP-cells, places in them and sites."""
        made: dict[Any, T] = {}
        kinds = [(*self.plan["members"][line].values(), *self.plan["sites"][line]) for line in range(self.num_lines)]
        for line, kind in enumerate(kinds):
            if kind not in made:
                made[kind] = make(line)
        return [made[kind] for kind in kinds]

    @cached_property
    def schedules(self) -> list[Schedule]:
        """The schedule of each line."""
        return self._by_kind(lambda line: pipeline_of(self.cell(line), self.plan["members"][line]["local_rank"]))

    def equal_shares(self, ranks: np.ndarray, first: int, steps: int) -> np.ndarray:
        """Return factors by which ranks would compute longer with equally many micro-batches, by step and rank.

        Args:
            first: the first of these steps.
        """
        counts = np.array([self.schedules[self.places[rank].line].num_microbatches for rank in ranks.tolist()])
        is_moved = np.arange(first, first + steps) > self.plan.get("adapted_after", 0)
        return np.where(is_moved[:, None], counts.mean() / counts, 1.0)

    def predicted(self, line: int = 0, costs: CostModel | None = None) -> Timeline:
        """Return the predicted timeline of a line, by its costs in the plan unless others are given."""
        member = self.plan["members"][line]
        if costs is None and self._measured_costs:
            costs = self._measured_costs[member["costs"]]
        return predict(self.cell(line), costs or self.costs, member["local_rank"])

    @cached_property
    def predictions(self) -> list[Timeline]:
        """The predicted timeline of each line."""
        return self._by_kind(self.predicted)

    @cached_property
    def classes(self) -> list[tuple[int, ...]]:
        """The classes: the ranks of each pipeline stage."""
        by_stage = defaultdict(list)
        for place in self.places.values():
            by_stage[place.stage].append(place.rank)
        return [tuple(ranks) for ranks in by_stage.values()]

    def refresh(self) -> bool:
        """Read what is new. Return True if anything is."""
        known, has_new_plan = len(self.metrics), self._refresh_plan()
        self.metrics = self._metrics.read()
        return self.steps.refresh() or len(self.metrics) != known or has_new_plan

    def _refresh_plan(self) -> bool:
        """Read the plan again if the schedule has changed while training. Return True if it has."""
        before = self.plan
        try:
            written_ns = self._file("plan.json").stat().st_mtime_ns
            if written_ns == self._plan_written_ns:
                return False
            plan = printable(parse_json(read_text(self._file("plan.json"))))
            if plan["ranks"] != self.plan["ranks"]:  # of another attempt, with other ranks
                return False
            self.plan, self._plan_written_ns = plan, written_ns
            self._read_plan()
        except (OSError, *_DAMAGED):
            self.plan = before
            return False
        self._forget_plan()
        self._earlier.clear()
        return True

    def of_step(self, step: int) -> RunRecord:
        """Return this record with the plan that a step ran, if the schedule has changed since."""
        if step > self.plan.get("adapted_after", 0):
            return self
        files = ((int(match[1]), path) for path in self.folder.iterdir() if (match := EARLIER.fullmatch(path.name)))
        _, path = min((found for found in files if found[0] >= step), default=(0, None))
        if path is None:
            return self
        if path not in self._earlier:
            earlier = copy(self)
            earlier._forget_plan()
            try:
                earlier.plan = printable(parse_json(read_text(path)))
                earlier._read_plan()
            except (OSError, *_DAMAGED):
                return self
            self._earlier[path] = earlier
        self._earlier[path].metrics = self.metrics
        return self._earlier[path]

    def _forget_plan(self) -> None:
        for name in ("classes", "schedules", "predictions"):
            self.__dict__.pop(name, None)

    @property
    def step_range(self) -> tuple[int, int]:
        """The first and the last recorded step, or (0, 0)."""
        return self.steps.step_range

    def spans(self, step: int) -> pd.DataFrame:
        """Return every event of a step with its kind and host, or an empty table if they are no longer recorded.

        Times are by the first host's clock (`weft.tools.watch.clocks`).
        """
        found = []
        for path in sorted(files_of(self.folder / FOLDER, "spans-*.parquet"), key=file_number):
            try:
                table = pd.read_parquet(path, filters=[("step", "==", step)])
            except (OSError, ValueError):
                continue  # it is being replaced or removed
            if len(table):
                found.append(table.astype({"section": str, "slot": str}).assign(host=host_of(path)))
        if not found:
            return pd.DataFrame(columns=["step", "rank", "section", "stage", "slot", "start_s", "end_s", "host"])
        table = pd.concat(found, ignore_index=True)
        ends = table[table.section == "step"].groupby("rank").start_s.max()
        # A restarted run repeats steps. The last repetition counts.
        table = table[table.start_s >= table["rank"].map(ends).fillna(-inf) - 1e-9]
        ahead_s = table.host.map({host: clock.ahead_s for host, clock in self.clocks(table).items()})
        return table.assign(start_s=table.start_s - ahead_s, end_s=table.end_s - ahead_s).sort_values("start_s")

    def clocks(self, spans: pd.DataFrame) -> dict[str, Clock]:
        """Return the clocks of the hosts with spans, that of the first rank's host first."""
        hosts = list(spans.sort_values("rank").host.unique())
        if len(hosts) < 2:
            return line_up(hosts, ())
        host_of_rank = spans.groupby("rank").host.first()
        passed = (
            (host_of_rank[rank], host_of_rank[peer], ended_s - start_s)
            for rank, peer, _, start_s, _, ended_s in self.arrivals(spans)
        )
        return line_up(hosts, chain(passed, self._sums(spans)))

    def _sums(self, spans: pd.DataFrame) -> Iterator[tuple[str, str, float]]:
        """Yield sums of gradients as transfers, in both directions between a stage's first host and each other one.

        A rank's optimiser ends after the last backward of every replica, because it needs the sum of their gradients.
        """
        rows = spans.assign(stage=spans["rank"].map({rank: place.stage for rank, place in self.places.items()}))
        summed_s = rows[rows.section == Op.STEP.name].groupby(["stage", "host"]).end_s.min()
        sent_s = rows[rows.section.isin(COMPUTE_SECTIONS)].groupby(["stage", "host"]).end_s.max()
        known = pd.concat([summed_s, sent_s], axis=1, keys=["summed", "sent"]).dropna()
        for _, table in known.groupby(level="stage"):
            first, *others = table.droplevel("stage").itertuples()
            for other in others:
                yield first.Index, other.Index, other.summed - first.sent
                yield other.Index, first.Index, first.summed - other.sent

    def arrivals(self, spans: pd.DataFrame) -> Iterator[tuple[int, int, Action, float, float, float]]:
        """Yield the transfers of a step: rank, receiving rank, send, its start, and the receive's start and end."""
        received: dict[tuple[int, Action], tuple[float, float]] = {}
        for row in spans[spans.section.isin(["RECV_F", "RECV_B"])].itertuples():
            if row.rank in self.places:
                received[self.places[row.rank].line, parse_slot(row.slot)[0]] = row.start_s, row.end_s
        for row in spans[spans.section.isin(["SEND_F", "SEND_B"])].sort_values("start_s").itertuples():
            place, send = self.places.get(row.rank), parse_slot(row.slot)[0]
            if place is not None and (place.line, receive := receive_of(send)) in received:
                peer = self.plan["ranks"][place.line][self.placement.stage_ranks[receive.stage]]
                yield int(row.rank), peer, send, row.start_s, *received[place.line, receive]

    def step_with_spans(self, step: int | None = None) -> int:
        """Return the recorded step with events that is nearest to ``step``, or the newest, or 0."""
        steps = set[int]()
        for path in files_of(self.folder / FOLDER, "spans-*.parquet"):
            try:
                steps.update(int(step) for step in pd.read_parquet(path, columns=["step"]).step.unique() if step)
            except (OSError, ValueError):
                continue
        return (max(steps) if step is None else min(steps, key=lambda each: abs(each - step))) if steps else 0

    def timelines(self, spans: pd.DataFrame) -> list[Timeline]:
        """Return the measured timeline of each line of a step, all counted from its earliest start."""
        origin = float(spans.start_s.min()) if len(spans) else 0.0
        lines: list[list[Span]] = [[] for _ in range(self.num_lines)]
        for row in spans.itertuples():
            if row.rank not in self.places or not row.slot or row.section not in Op.__members__:
                continue
            slot, place = parse_slot(row.slot), self.places[row.rank]
            if slot[0].op in MEASURED_LANES:
                lane = MEASURED_LANES[slot[0].op]
                lines[place.line].append(Span(place.stage, lane, slot, row.start_s - origin, row.end_s - origin))
        count = self.placement.num_ranks
        return [
            Timeline(f"{self.schedules[line].name} measured", count, tuple(spans), (0.0,) * count, (0,) * count)
            for line, spans in enumerate(lines)
        ]

    def current(self) -> list[dict[str, Any]]:
        """Return what each rank does now, or did last, from all hosts. See `RingReader.current`."""
        found = []
        for path in (self.folder / FOLDER).glob("now-*.json"):
            with suppress(ValueError, KeyError, TypeError):  # it is being replaced, or damaged
                now = printable(parse_json(read_text(path)))
                found += [{**entry, "host": now["host"], "at": now["at"]} for entry in now["ranks"]]
        return sorted(found, key=lambda entry: entry["rank"])


def waits_for(record: RunRecord, rank: int, slot_text: str) -> int | None:
    """Return the rank that produces the input of a rank's slot, if the slot receives from another."""
    place = record.places.get(rank)
    if place is None or not slot_text or not slot_text[0].isdigit():
        return None
    schedule = record.schedules[place.line]
    action = parse_slot(slot_text)[0]
    if action.op not in (Op.RECV_F, Op.RECV_B):
        return None
    producer = action.stage + (-1 if action.op is Op.RECV_F else 1)
    ranks: list[int] = record.plan["ranks"][place.line]
    return ranks[schedule.placement.stage_ranks[producer]]


def producer_of(schedule: Schedule, action: Action) -> tuple[int, Action] | None:
    """Return the computation on another rank that a computation needs, with its rank, or None."""
    if action.op not in (Op.F, Op.B, Op.I):
        return None
    placement = schedule.placement
    stage = action.stage + (-1 if action.op is Op.F else 1)
    if not 0 <= stage < placement.num_stages or placement.stage_ranks[stage] == placement.stage_ranks[action.stage]:
        return None
    return placement.stage_ranks[stage], Action(Op.F if action.op is Op.F else Op.I, stage, action.microbatch)


def _costs(tree: dict[str, Any], collectives: list[list[float]] | None) -> CostModel:
    stages = [StageCost(**stage) for stage in tree["stages"]]
    if collectives is not None:
        pairs = zip(stages, collectives, strict=True)
        stages = [replace(stage, reduce_s=reduce, unshard_s=unshard) for stage, (reduce, unshard) in pairs]
    links = tuple((tuple(pair), _link(link)) for pair, link in tree["wan_links"])
    return CostModel(stages=tuple(stages), local=_link(tree["local"]), wan=_link(tree["wan"]), wan_links=links)


def _link(tree: dict[str, Any]) -> LinkCost:
    found: dict[str, Any] = {name: inf if value is None else value for name, value in tree.items()}
    return LinkCost(**found)


def _sites(config: dict[str, Any]) -> list[dict[str, Any]]:
    return config["cluster"].get("sites") or [{"name": "one site"}]
