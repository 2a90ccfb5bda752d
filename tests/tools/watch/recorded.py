"""Recorded runs, made by the simulator: a plan, metrics, and the collector's files."""

import json
from dataclasses import asdict, replace
from math import isfinite

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from weft.conf.schema import ScheduleKind, SiteConfig, WeftConfig
from weft.conf.trees import to_yaml
from weft.engine.observability.event_ring import encode, encode_slot
from weft.pipeline.action import COMPUTE, RECEIVES, Action, Op, receive_of, slot_text
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.dependencies import establishes
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.tools.watch import FOLDER
from weft.tools.watch.collector import spans, summaries
from weft.tools.watch.prefills import STORED

STAGE = StageCost(forward_s=0.01, input_s=0.01, weight_s=0.01, activation_bytes=1e6, output_bytes=2**20)
COMPUTE_CODES = [encode(op.value) & 0xFF for op in (*COMPUTE, Op.STEP)]


def tree_of(value):
    """A dataclass as ``plan.json`` has it: infinite numbers are null."""
    if isinstance(value, dict):
        return {key: tree_of(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [tree_of(entry) for entry in value]
    return value if not isinstance(value, float) or isfinite(value) else None


class Recording:
    """A run of ``lines`` pipelines of ``stages`` ranks each, at ``sites``: the number of stages by name."""

    def __init__(
        self,
        folder,
        *,
        stages=4,
        lines=2,
        microbatches=8,
        kind="1f1b",
        name="recorded",
        local=None,
        seed=0,
        sites=None,
        wan=None,
    ):
        self.folder, self.lines, self.rng = folder, lines, np.random.default_rng(seed)
        layout = "straight" if kind in ("1f1b", "gpipe") else "fold"
        self.placement = Placement.named(layout, stages, tuple((sites or {}).values()))
        self.costs = CostModel(
            stages=(STAGE,) * self.placement.num_stages, local=local or LinkCost(), wan=wan or LinkCost()
        )
        self.schedule = lower(
            generate(kind, self.placement, microbatches, costs=self.costs, search_seconds=0.2), zero_stage=0
        )
        self.step_s = simulate(self.schedule, self.costs).step_s
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FOLDER).mkdir(exist_ok=True)
        config = WeftConfig()
        config.train.name, config.train.steps = name, 1000
        config.pipeline.schedule = ScheduleKind[kind]
        config.cluster.sites = [SiteConfig(name=each, ranks=count) for each, count in (sites or {}).items()]
        (folder / "config.yaml").write_text(to_yaml(config))
        (folder / "plan.json").write_text(json.dumps(self._plan()))
        self.events, self.now_s = [], 1e9

    def rank(self, line, stage):
        return stage * self.lines + line

    def _plan(self):
        shape = self.placement
        rows = [" ".join(map(slot_text, row)) for row in self.schedule.rows]
        count = self.schedule.num_microbatches
        return {
            "predicted": {"step_s": self.step_s, "bubble_share": simulate(self.schedule, self.costs).bubble_share},
            "placement": {
                "groups": shape.groups,
                "legs": shape.legs,
                "sites": shape.sites,
                "pipelines": 1,
                "rank_stages": shape.rank_stages,
            },
            "schedules": {"1": {"name": self.schedule.name, "num_microbatches": count, "rows": rows}},
            "members": [{"pipelines": 1, "local_rank": 0}] * self.lines,
            "sites": [list(shape.sites)] * self.lines,
            "ranks": [[self.rank(line, stage) for stage in range(shape.num_ranks)] for line in range(self.lines)],
            "costs": tree_of(asdict(self.costs)),
            "collectives": None,
        }

    def run(self, steps, *, slow=None, jitter=0.01, data_s=0.001, local=None, optimiser_s=0.002, hops=None):
        """Add steps.

        ``slow`` are factors of ranks' computations, ``hops`` of links between ranks, and ``jitter`` is that of every
        rank and step, and, if there are ``hops``, of every link and step.
        """
        for _ in range(steps):
            step, begun = 1 + len(self.events), self.now_s
            rows, ends = [], {}
            for line in range(self.lines):
                factors = [
                    (slow or {}).get(self.rank(line, stage), 1.0) * (1 + jitter * self.rng.standard_normal())
                    for stage in range(self.placement.num_ranks)
                ]
                links = self._links(line, hops, jitter) if hops is not None else ()
                rows += self._line(line, factors, step, begun + data_s, local, ends, links)
            last = max(ends.values())
            end = last + 0.0005 + optimiser_s
            for rank, free_s in ends.items():
                stage = self.placement.rank_stages[rank // self.lines][0]
                rows.append((rank, encode("STEP", stage), 0, step, free_s, end))
                rows.append((rank, encode("sums"), 0, step, free_s, last + 0.0005))
                rows.append((rank, encode("data"), 0, step, begun, begun + data_s))
                rows.append((rank, encode("step"), 0, step, begun, end))
            self.events.append(np.array(rows, STORED))
            self.now_s = end

    def _links(self, line, hops, jitter):
        """The links of a line's neighbouring ranks, each of which is a site of its own."""
        count = self.placement.num_ranks
        pairs = [(a, b) for a in range(count) for b in (a - 1, a + 1) if 0 <= b < count]
        return tuple(
            (pair, replace(self.costs.local, latency_s=self.costs.local.latency_s * factor))
            for pair in pairs
            for factor in [
                hops.get(tuple(self.rank(line, end) for end in pair), 1.0) * (1 + jitter * self.rng.standard_normal())
            ]
        )

    def _line(self, line, factors, step, begun, local, ends, links=()):
        ranks = self.placement.stage_ranks
        stages = tuple(
            replace(
                cost,
                forward_s=cost.forward_s * factors[ranks[n]],
                input_s=cost.input_s * factors[ranks[n]],
                weight_s=cost.weight_s * factors[ranks[n]],
            )
            for n, cost in enumerate(self.costs.stages)
        )
        costs, schedule = replace(self.costs, stages=stages, local=local or self.costs.local), self.schedule
        if links:
            apart = replace(self.placement, sites=(1,) * self.placement.num_ranks)
            costs, schedule = replace(costs, wan_links=links), replace(schedule, placement=apart)
        timeline = simulate(schedule, costs)
        rows = []
        arrivals = {receive_of(s.slot[0]): s.end_s for s in timeline.spans if s.lane.peer is not None}
        made = {fact: s.end_s for s in timeline.spans if s.lane == "compute" for a in s.slot for fact in establishes(a)}
        for stage, row in enumerate(self.schedule.rows):
            starts = {span.slot: span for span in timeline.compute[stage]}
            free_s = 0.0
            for slot in row:
                start = end = free_s
                if slot[0].op in COMPUTE:
                    start, end = starts[slot].start_s, starts[slot].end_s
                elif slot[0].op in RECEIVES:
                    op, number, microbatch = slot[0]
                    source = (
                        Action(Op.F, number - 1, microbatch)
                        if op is Op.RECV_F
                        else Action(Op.I, number + 1, microbatch)
                    )
                    end = max(free_s, arrivals.get(slot[0], made[source]))
                elif slot[0].op is Op.STEP:
                    ends[self.rank(line, stage)] = begun + free_s
                    continue
                rows.append((self.rank(line, stage), *encode_slot(slot), step, begun + start, begun + end))
                free_s = end
        return rows

    def wait_inside(self, rank, share):
        """Add waits for weights inside of a rank's computations in all steps, for ``share`` of each."""
        for number, events in enumerate(self.events):
            own = events[(events["rank"] == rank) & np.isin(events["first"] & 0xFF, COMPUTE_CODES[:-1])]
            waits = own.copy()
            waits["first"], waits["second"] = own["first"] & 0xFFFFFF00 | encode("weights") & 0xFF, 0
            waits["end"] = own["start"] + share * (own["end"] - own["start"])
            self.events[number] = np.concatenate([events, waits])

    def prefill(self, step, share=0.5, tokens=64):
        """Add a prefill to each bubble of a step, for ``share`` of it, and return them: rank, start and end."""
        events = self.events[step - 1]
        added = []
        for rank in np.unique(events["rank"]):
            own = events[events["rank"] == rank]
            work = np.sort(own[np.isin(own["first"] & 0xFF, COMPUTE_CODES)], order="start")
            for start, end in zip(work["end"], work["start"][1:], strict=False):
                if end - start > 1e-4:
                    added.append((rank, encode("prefill", -1, tokens), 0, step, start, start + share * (end - start)))
        self.events[step - 1] = np.concatenate([events, np.array(added, STORED)])
        return [(int(rank), start, end) for rank, *_, start, end in added]

    def write(self, hosts=None):
        """Write the files, and return the folder. ``hosts`` have some ranks, and clocks that are ahead."""
        every = np.concatenate(self.events)
        for host, (ranks, ahead_s) in (hosts or {"host": (np.unique(every["rank"]), 0.0)}).items():
            events = every[np.isin(every["rank"], ranks)]
            for name in ("start", "end"):
                events[name] += ahead_s
            for kind, columns in (("steps", summaries(events)), ("spans", spans(events))):
                parquet.write_table(pa.table(columns), self.folder / FOLDER / f"{kind}-{host}-00001.parquet")
        lines = []
        for step, found in enumerate(self.events, start=1):
            seconds = float(found["end"].max() - found["start"].min())
            entry = {
                "step": step,
                "kind": "train",
                "loss": 8.0 * 0.99**step,
                "step_seconds": seconds,
                "tokens_per_second": 4096 / seconds,
                "mfu": 0.4,
                "bubble_share": 0.3,
                "peak_memory_gb": 12.5,
                "grad_norm": 1.0,
                "lr": 1e-3,
            }
            lines.append(json.dumps(entry))
        (self.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return self.folder
