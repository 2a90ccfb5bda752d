"""`weft explain`: name what limits a run and what to change, with the gain by re-simulation with measured costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.pipeline.action import Op
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.memory import peak_bytes
from weft.pipeline.profile import fit_costs
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate
from weft.pipeline.text import bytes_text
from weft.pipeline.timeline import Timeline
from weft.tools.watch.analysis import Hop, hops, measured_shares, slow_hops, transfers_by_hop
from weft.tools.watch.outliers import WINDOW, Deviation, outliers, pauses
from weft.tools.watch.record import RunRecord

STEPS = 8
"""Recorded steps from which costs are measured."""
MOST_RANKS = 1000
"""Ranks of a run up to which links are compared over `WINDOW` steps."""
LEAST_GAIN = 0.01
SLOW_LINK = 1.5
"""Ratio to the other links of its kind from which a link is slow."""
LEAST_LINK_S = 5e-4
"""Excess of a transfer below which scheduling of processes may be its cause."""
SEARCH_S = 1.0
PAUSE_ADVICE = {
    "compute": "look for garbage collection (`gc.freeze()`, or `gc.collect()` in the same step on all ranks)",
    "REDUCE_GRAD": "their peers wait, so look for what delays the start of a reduction",
}


@dataclass(frozen=True)
class Limit:
    """A limit on a run's throughput.

    Attributes:
        kind: microbatches, rank, pauses, link, data, schedule or checkpoint.
        gain: share by which tokens per second would grow without it.
        text: the limit, and what to change.
    """

    kind: str
    gain: float
    text: str


class Measured:
    """A run's measured costs, and predictions from them.

    Attributes:
        step_s: measured seconds of a step.
        costs: for each line, the plan's costs with measured seconds.
    """

    def __init__(self, record: RunRecord) -> None:
        """Measure the newest steps. Raise ValueError if no step is recorded."""
        self.record = record
        newest = record.step_with_spans()
        changed = record.plan.get("adapted_after", 0)  # steps before it ran another schedule
        changed = changed if changed < newest else 0
        first = max(record.step_range[0] + 1, newest - STEPS + 1, changed + 1)  # the first step is slower than others
        tables = [table for step in range(first, newest + 1) if len(table := record.spans(step))]
        whole_s = record.steps.window(first, record.step_range[1], ("step",)).seconds
        if not tables or not whole_s.any():
            raise ValueError(
                f"{record.folder}: too few steps are recorded; it takes logging.events=true, and two steps"
            )
        self.step_s = float(np.median(whole_s[whole_s > 0]))
        self.data_s = self._mean_of("data", first, newest)
        self.checkpoint_s = self._mean_of("checkpoint", record.step_range[0], newest)
        self.shares = measured_shares(record, tables[-1])
        by_line: list[list[Timeline]] = [[] for _ in range(record.num_lines)]
        for table in tables:
            for line, timeline in enumerate(record.timelines(table)):
                # Waits of the optimiser's slot are no work, and stay when other times change.
                spans = tuple(span for span in timeline.spans if span.slot[0].op is not Op.STEP)
                by_line[line].append(replace(timeline, spans=spans))
        more = range(max(1, newest - WINDOW + 1), first) if len(record.places) <= MOST_RANKS else ()
        transfers = [transfers_by_hop(record, table) for table in (*map(record.spans, more), *tables)]
        self.hops, self.slow_hops = hops(record, transfers), slow_hops(record, transfers)
        self.costs = [self._with_links(_without_steps(fit_costs(timelines, record.costs))) for timelines in by_line]
        self.simulated_s = self.simulate(self.costs)

    def _mean_of(self, section: str, first: int, last: int) -> float:
        """Return a section's seconds per step on the rank that it delays most."""
        total_s = self.record.steps.totals(first, last, (section,)).seconds
        return float(total_s.max(initial=0.0)) / (last - first + 1)

    def _with_links(self, costs: CostModel) -> CostModel:
        """Return costs with the measured transfer times as latencies."""
        inside = [hop["fastest_s"] for hop in self.hops if not hop["crosses"]]
        across: dict[tuple[int, int], float] = {}
        for hop in self.hops:
            if hop["crosses"]:
                pair = self.record.places[hop["from"]].site, self.record.places[hop["to"]].site
                across[pair] = max(across.get(pair, 0.0), hop["fastest_s"])
        size, local, wan_links = max(stage.output_bytes for stage in costs.stages), costs.local, []
        if inside:
            local = replace(local, latency_s=max(0.0, float(np.median(inside)) - local.transit_s(size)))
        for pair, seconds in across.items():
            link = costs.link(*pair)
            wan_links.append((pair, replace(link, latency_s=max(0.0, seconds - link.transit_s(size)))))
        return replace(costs, local=local, wan_links=(*costs.wan_links, *wan_links))

    def simulate(self, costs: list[CostModel], schedule: Schedule | None = None) -> float:
        """Return the simulated seconds of a step of the slowest line, by its own schedule unless one is given."""
        return max(
            simulate(schedule or own, each).step_s for own, each in zip(self.record.schedules, costs, strict=True)
        )

    def gain(self, saved_s: float, tokens: float = 1.0) -> float:
        """Return the growth of tokens per second if a step saved so many seconds and had ``tokens`` times the tokens.

        What is measured and not simulated, such as waits of the optimiser, stays.
        """
        return tokens * self.step_s / max(self.step_s - saved_s, 1e-9) - 1.0


def _without_steps(costs: CostModel) -> CostModel:
    return replace(costs, stages=tuple(replace(stage, step_s=0.0) for stage in costs.stages))


def limits(record: RunRecord) -> list[Limit]:
    """Return what limits a run, the largest gain first. Raise ValueError if no step is recorded."""
    run = Measured(record)
    found = [
        limit for each in (_microbatches, _ranks, _pauses, _links, _data, _schedule, _checkpoint) for limit in each(run)
    ]
    return sorted((limit for limit in found if limit.gain >= LEAST_GAIN), key=lambda limit: -limit.gain)


def _bubbles(run: Measured) -> float:
    return float(np.mean([s["bubbles"] / s["step"] for s in run.shares.values()])) if run.shares else 0.0


def _other_schedule(run: Measured, kind: str, microbatches: int) -> Schedule:
    """Return another schedule for all lines, by the measured costs of the first."""
    settings, schedule = run.record.config["pipeline"], run.record.schedules[0]
    cap = float(settings["memory_cap_bytes"]) or None if microbatches != schedule.num_microbatches else None
    compute = generate(
        kind,
        schedule.placement,
        microbatches,
        costs=run.costs[0],
        memory_cap_bytes=cap,
        search_seconds=SEARCH_S,
        launch_together=settings["launch_together"] if kind == "interleaved" else 0,
    )
    return lower(compute, zero_stage=run.record.config["zero"]["stage"])


def _microbatches(run: Measured) -> Iterator[Limit]:
    record, kind = run.record, run.record.config["pipeline"]["schedule"]
    count = record.schedules[0].num_microbatches
    if record.placement.num_ranks < 2 or kind == "file":
        return
    try:
        more = _other_schedule(run, kind, 2 * count)
    except ValueError:
        return
    added_s = run.simulate(run.costs, more) - run.simulated_s + run.data_s
    peaks = [peak_bytes(each, record.costs) for each in (record.schedules[0], more)]
    memory = "in the same memory" if peaks[1] <= peaks[0] else f"for {bytes_text(peaks[1] - peaks[0])} more memory"
    yield Limit(
        "microbatches",
        run.gain(-added_s, 2.0),
        f"bubbles take {_bubbles(run):.0%} of a step: pipeline.microbatches={2 * count} instead of {count} gives more "
        f"tokens per second, {memory}",
    )


def _ranks(run: Measured) -> Iterator[Limit]:
    """Yield a limit for each slow rank: its computations replaced by those of its class."""
    for outlier in outliers(run.record):
        if outlier.section == "compute":
            costs = list(run.costs)
            place = run.record.places[outlier.rank]
            costs[place.line] = _relieved(costs[place.line], place.stages, outlier)
            saved_s = run.simulated_s - run.simulate(costs)
            yield Limit(
                "rank", run.gain(saved_s), f"{outlier.text(run.record)}: examine or evict its host (`weft evict`)"
            )


def _relieved(costs: CostModel, stages: tuple[int, ...], outlier: Deviation) -> CostModel:
    def faster(number: int) -> Any:
        cost = costs.stages[number]
        if number not in stages:
            return cost
        names = ("forward_s", "input_s", "weight_s")
        return replace(cost, **{name: getattr(cost, name) / (1 + outlier.share) for name in names})

    return replace(costs, stages=tuple(faster(number) for number in range(len(costs.stages))))


def _pauses(run: Measured) -> Iterator[Limit]:
    for each in pauses(run.record):
        advice = PAUSE_ADVICE.get(each.section, "look for what the ranks do then (`py-spy`)")
        yield Limit("pauses", run.gain(each.lost_s), f"{each.text()}: {advice}")


def _links(run: Measured) -> Iterator[Limit]:
    """Yield a limit for the hops that are slower than planned (if nothing is: than all), or than other pipelines'."""
    slow: dict[Hop, tuple[float, float]] = {}
    for crosses in (False, True):
        alike = [hop for hop in run.hops if hop["crosses"] is crosses]
        middle = float(np.median([hop["fastest_s"] for hop in alike])) if len(alike) > 2 else 0.0
        for hop in alike:
            expected = hop["planned_s"] or middle
            if hop["exact"] and hop["fastest_s"] > SLOW_LINK * expected > 0:
                slow[_key(hop)] = hop["fastest_s"], expected
    slow = {key: each for key, each in (run.slow_hops | slow).items() if each[0] - each[1] > LEAST_LINK_S}
    if not slow:
        return
    worst = max((hop for hop in run.hops if _key(hop) in slow), key=lambda hop: slow[_key(hop)][0])
    needs_s, expected = slow[_key(worst)]
    others = f" ({len(slow) - 1} other hops are slow as well)" if len(slow) > 1 else ""
    usual = {key: expected for key, (_, expected) in slow.items()}
    yield Limit(
        "link",
        run.gain(_simulated_hops(run, {key: needs for key, (needs, _) in slow.items()}) - _simulated_hops(run, usual)),
        f"the link from rank {worst['from']} to rank {worst['to']} needs {needs_s * 1e3:.2f} ms for "
        f"{bytes_text(worst['bytes'])}, {'its plan expects' if expected == worst['planned_s'] else 'the others need'} "
        f"{expected * 1e3:.2f} ms{others}: examine it (`weft doctor {'net' if worst['crosses'] else 'ring'}`)",
    )


def _key(hop: dict[str, Any]) -> Hop:
    return hop["from"], hop["to"], hop["kind"]


def _simulated_hops(run: Measured, changed: dict[Hop, float]) -> float:
    """Return the simulated seconds of a step with the measured time of every hop, except for those that are changed.

    The simulator has one link inside a site. So each rank becomes a site of its own, with links between them.
    """
    record, seconds = run.record, dict[tuple[int, int, int], float]()
    for hop in run.hops:
        here, there = record.places[hop["from"]], record.places[hop["to"]]
        found = changed.get(_key(hop), hop["fastest_s"])
        key = here.line, here.stage, there.stage
        seconds[key] = max(seconds.get(key, 0.0), found)
    steps = []
    for line, schedule in enumerate(record.schedules):
        apart = replace(schedule, placement=replace(schedule.placement, sites=(1,) * schedule.num_ranks))
        pairs = tuple(((a, b), LinkCost(latency_s=s)) for (at, a, b), s in seconds.items() if at == line)
        steps.append(simulate(apart, replace(run.costs[line], wan_links=pairs)).step_s)
    return max(steps)


def _data(run: Measured) -> Iterator[Limit]:
    if run.data_s:
        share = run.data_s / run.step_s
        yield Limit(
            "data",
            run.gain(run.data_s),
            f"reading the batch takes {share:.0%} of a step ({run.data_s * 1e3:.1f} ms): tokenise in advance, or put "
            "the data on faster storage",
        )


def _schedule(run: Measured) -> Iterator[Limit]:
    """Yield a limit if another schedule of the same stages, with more memory, has fewer bubbles."""
    settings, record = run.record.config["pipeline"], run.record
    capped = settings["schedule"] == "auto" and settings["memory_cap_bytes"]
    if settings["schedule"] == "file" or (settings["schedule"] == "auto" and not capped):
        return
    count = record.schedules[0].num_microbatches
    try:
        other = _other_schedule(run, "auto", count)
    except ValueError:
        return
    saved_s = run.simulated_s - run.simulate(run.costs, other)
    peaks = [peak_bytes(each, record.costs) for each in (record.schedules[0], other)]
    memory = f"{bytes_text(peaks[1])} instead of {bytes_text(peaks[0])} of activations"
    what = "pipeline.memory_cap_bytes=0" if capped else "pipeline.schedule=auto"
    yield Limit("schedule", run.gain(saved_s), f"the schedule leaves bubbles: {what} fills them, with {memory}")


def _checkpoint(run: Measured) -> Iterator[Limit]:
    if run.checkpoint_s:
        yield Limit(
            "checkpoint",
            run.gain(run.checkpoint_s * run.step_s / (run.step_s + run.checkpoint_s)),
            f"checkpoints stop training for {run.checkpoint_s * 1e3:.1f} ms a step on average: "
            "checkpoint.background=true, or a larger checkpoint.every",
        )


def main(argv: list[str]) -> int:
    """Run ``weft explain RUN [--json]`` and return the exit code.

    Raises:
        ValueError: the folder has no run, or no step of it is recorded.
    """
    parser = argparse.ArgumentParser(prog="weft explain", description="Name what limits a run and what to change.")
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/quickstart")
    parser.add_argument("--json", action="store_true", help="print a list of kind, gain and text")
    args = parser.parse_args(argv)
    record = RunRecord(args.run)
    found, (first, last) = limits(record), record.step_range
    if args.json:
        print(json.dumps([asdict(limit) for limit in found]))
        return 0
    shares = Measured(record).shares.values()
    busy, whole = (sum(share[name] for share in shares) for name in ("compute", "step"))
    print(f"{record.name}, steps {first} to {last}: ranks compute for {busy / whole:.0%} of a step")
    for number, limit in enumerate(found, start=1):
        print(f"{number}. {limit.text} (+{limit.gain:.0%} tokens/s)")
    if not found:
        print(f"nothing was found that would gain {LEAST_GAIN:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
