"""Pipeline engines on four ranks of this host, on the same emulated layers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.peers.case import EngineCase, RankRun
from benchmarks.peers.comparison import Measured, show_steps
from benchmarks.peers.emulated_stage import EmulatedWork, layers_per_stage
from benchmarks.peers.registry import HOST
from benchmarks.results import finish, parse, show
from weft.pipeline.schedule import Schedule
from weft.pipeline.serialization import schedule_from_csv
from weft.pipeline.simulation import simulate
from weft.pipeline.timeline import Timeline
from weft.tools.links import Way, measure_link
from weft.tools.ranks import run_ranks

START_S = 60.0
"""Allowance for starting the ranks of a run."""
SLOWNESS = 10.0
"""Multiple of its ideal that a step may take before the run is aborted."""
SIZES = ((8, 8), (8, 16), (16, 8), (16, 16))
"""Layers and micro-batches."""
HIDDEN_MIB = (1, 8)
NUMBERS = range(1, len(SIZES) * len(HIDDEN_MIB) + 1)
GOAL, GOAL_ENGINE, GOAL_CASE = 1.10, "weft-1f1b", 2
"""Maximum ratio of a step to the simulation of its schedule, by engine and number of the case."""
_LEGEND = (
    "ideal: the engine's own schedule simulated with free communication. simulated: with the link as measured here.\n"
    "profiled: with the times that computations took in the run's warm-up, too, where the engine reports them.\n"
    "step: median, barrier to barrier. spread: middle half of the steps over the median.\n"
    "live layers: most layer activations alive at once, rank by rank. Compare engines that hold as much: ZBV, the\n"
    "best peer, holds two chunks for each rank, and so does Weft auto with ZBV's memory; Weft auto by itself takes\n"
    "what it needs, up to four times what 1F1B holds."
)


def main(argv: Sequence[str]) -> int:
    """Run every engine on every case and return 1 if Weft's 1F1B misses its goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engines host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each engine, in turns")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    parser.add_argument("--cases", nargs="+", metavar="N", type=int, default=list(NUMBERS), help=f"1 to {NUMBERS[-1]}")
    parser.add_argument("--engines", nargs="+", metavar="NAME", default=list(HOST), help=f"of {', '.join(HOST)}")
    args = parse(parser, argv, engines=HOST, cases=NUMBERS)
    cases = _cases(args.steps)
    chosen = [cases[number - 1] for number in sorted(args.cases)]
    rows = list(race(args.engines, chosen, rounds=args.rounds))
    show_steps(rows, "a training step: 10 ms forward, input and weight gradient per layer, 4 ranks")
    show(f"\n{_LEGEND}")
    goal_case = cases[GOAL_CASE - 1].name
    ratios = [row.over("simulated") for row in rows if (row.engine, row.case) == (GOAL_ENGINE, goal_case)]
    if not ratios or ratios[0] is None:
        return finish(args, "engines", rows)
    met = ratios[0] <= GOAL
    word = "met" if met else "MISSED"
    print(f"Weft's 1F1B took {ratios[0]:.3f} of its simulation: the goal of {GOAL:.2f} is {word}")
    return finish(args, "engines", rows, met=met)


def _cases(num_steps: int) -> list[EngineCase]:
    base = EngineCase(num_steps=num_steps)
    return [
        replace(base, num_layers=layers, num_microbatches=count, work=EmulatedWork(hidden_bytes=mib * 2**20))
        for layers, count in SIZES
        for mib in HIDDEN_MIB
    ]


def race(engines: Sequence[str], cases: Sequence[EngineCase], *, rounds: int) -> Iterator[Measured]:
    """Run every engine on every case, alternating engines, so that the machine's load affects all alike.

    Raises:
        RuntimeError: an engine failed or took too long.
    """
    for case in cases:
        links = {way is Way.shared: measure_link(case.work.hidden_bytes, way) for way in (Way.gloo, Way.shared)}
        runs: dict[str, list[Measured]] = {name: [] for name in engines}
        for turn in range(rounds):
            for name in engines:
                print(f"{case.name}: round {turn + 1} of {rounds}, {HOST[name].title}", file=sys.stderr)
                runs[name].append(measure(name, replace(case, link=links[HOST[name].is_weft])))
        for first, *others in runs.values():
            yield replace(first, step_s=sum((other.step_s for other in others), first.step_s))


def measure(name: str, case: EngineCase) -> Measured:
    """Run an engine once, in fresh processes, and return its steps and those of its schedule by simulation.

    Its references are simulated steps: with free communication, with the measured link, and with the computations of
    the warm-up, too, if the engine reports them. The notes have each rank's maximum number of live layer activations.

    Raises:
        RuntimeError: a rank failed, or the run took too long.
    """
    work = case.work
    serial_s = case.num_layers * case.num_microbatches * (work.forward_s + work.input_s + work.weight_s)
    timeout_s = START_S + SLOWNESS * (case.num_warmup + case.num_steps) * serial_s / case.num_ranks
    ranks = run_ranks(case.num_ranks, HOST[name].run, case, timeout_s, timeout_s=timeout_s)
    schedule, profile = _schedule(name, ranks), ranks[0].profile
    num_stages = schedule.placement.num_stages
    ideal = simulate(schedule, work.costs(case.num_layers, num_stages))
    linked = simulate(schedule, work.costs(case.num_layers, num_stages, local=case.link))
    profiled_s = None if profile is None else _end_s(simulate(schedule, profile))
    each = layers_per_stage(case.num_layers, num_stages)
    return Measured(
        engine=name,
        title=HOST[name].title,
        case=case.name,
        step_s=ranks[0].step_s,
        references={"ideal": _end_s(ideal), "simulated": _end_s(linked), "profiled": profiled_s},
        ratios=("simulated", "profiled"),
        notes={"live layers": " ".join(str(each * chunks) for chunks in ideal.live_microbatches)},
    )


def _end_s(timeline: Timeline) -> float:
    return max(span.end_s for span in timeline.spans)


def _schedule(name: str, ranks: Sequence[RankRun]) -> Schedule:
    """Return the schedule that the ranks executed; engines run the halves of a pair one after the other."""
    schedule = schedule_from_csv("\n".join(",".join(rank.cells) for rank in ranks), name=name)
    return schedule.with_rows([[(action,) for action in schedule.actions(rank)] for rank in range(schedule.num_ranks)])
