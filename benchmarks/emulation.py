"""Emulation: emulated steps compared with real ones, and what-ifs with real changes."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import sleep

import torch.distributed as dist

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.case import EngineCase, time_steps
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import Layout, Links, measured_links, wan_topology
from benchmarks.peers.weft_engine import LayersJob, emulated_engine, set_speed
from benchmarks.results import finish, parse, show, write_json
from weft.conf.schema import WeftConfig
from weft.recipes.emulation.session import Setting
from weft.recipes.emulation.turns import Emulation, emulated
from weft.tools.links import Way, measure_link
from weft.tools.netbed import NetBed
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

GOALS = GOAL, MOST = 0.005, 0.015
"""Error of the median that most jobs keep to, and that all do.

Each is besides the real job's own difference between runs. Where real runs differ by more than the second, the machine
was too busy to tell, and nothing is shown.
"""
PARTS = ("jobs", "what-ifs")
LAYER_MS = 60.0
"""Milliseconds of a layer's forward and of each gradient. The host takes about 0.3 ms of a slot, and twice that where
eight real ranks share two processors, which emulated ones do not. Of slots of 30 ms that exceeds the goal."""
TIMEOUT_S = 280.0


def work_of_layers(layer_ms: float) -> EmulatedWork:
    """Return the work of each layer of a job."""
    seconds = layer_ms / 1e3
    return EmulatedWork(forward_s=seconds, input_s=seconds, weight_s=seconds, hidden_bytes=2**18, weight_elements=2**14)


LAYOUTS = (
    Layout("straight"),
    Layout("w, fold", schedule="w", placement="fold"),
    Layout("site fold", schedule="w", placement="site_fold", sites=(2, 2)),
    Layout("cells of 2", replicas=2, sites=(2, 2), cell=2),
    Layout("eight stages", stages=8),
    Layout("uneven layers", layers=(3, 1, 3, 1)),
    Layout("interleaved", schedule="interleaved", placement="interleaved"),
    Layout("2 replicas, ZeRO-0", stages=2, replicas=2, zero=0),
    Layout("2 replicas, ZeRO-2", stages=2, replicas=2, zero=2),
    Layout("4 replicas, ZeRO-3", stages=2, replicas=4, zero=3),
    Layout("4 x 4", stages=4, replicas=4),
    Layout("straggler", slow=(2, 0.8)),
    Layout("two stages", stages=2),
    Layout("auto", schedule="auto", placement="fold"),
)
_LARGEST = LAYOUTS[10]
_LARGEST_AT_SITES = Layout("4 x 2 at two sites", replicas=2, sites=(2, 2))
CHANGES = {
    "slow rank": (_LARGEST, replace(_LARGEST, name="4 x 4, a rank at 80 %", slow=(5, 0.8))),
    "jitter": (_LARGEST_AT_SITES, replace(_LARGEST_AT_SITES, name="4 x 2, 10 ms of jitter", jitter_ms=10.0)),
    "bandwidth": (_LARGEST_AT_SITES, replace(_LARGEST_AT_SITES, name="4 x 2, twice the bandwidth", bandwidth=2.0)),
}
"""Pairs of a job and the same job with one change, on as many ranks as this machine can run concurrently."""


_POLL_S = 0.02


@dataclass(frozen=True)
class Beside:
    """The step of a job, real and emulated.

    Attributes:
        real_s, emulated_s: seconds of a step, the median of each run.
    """

    name: str
    ranks: int
    real_s: list[float]
    emulated_s: list[float]

    @property
    def own(self) -> float:
        """The largest relative difference of a real run from the median of real runs."""
        return max(abs(s / median(self.real_s) - 1) for s in self.real_s)

    @property
    def error(self) -> float:
        """Relative difference of the emulated step from the real one."""
        return median(self.emulated_s) / median(self.real_s) - 1


@dataclass
class Turns:
    """Files with which real ranks and an emulation alternate; called repeatedly while the ranks run."""

    folder: Path
    rounds: int
    measure: Callable[[], Emulation]
    emulated_s: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        """Emulate if the real ranks wait, then let them run."""
        number = len(self.emulated_s)
        if number == self.rounds or not self._file("ready", number).exists():
            sleep(_POLL_S)
            return
        self.emulated_s.append(self.measure().step_s)
        self._file("go", number).touch()

    def wait(self, number: int) -> None:
        """Wait until the real ranks may run. They all call it."""
        dist.barrier()
        if dist.get_rank() == 0:
            self._file("ready", number).touch()
        while not self._file("go", number).exists():
            sleep(_POLL_S)

    def _file(self, name: str, number: int) -> Path:
        return self.folder / f"{name}{number}"


def compare(layout: Layout, links: Links, work: EmulatedWork, rounds: int, steps: int, at_once: int) -> Beside:
    """Run rounds of one job, emulated and real.

    Args:
        at_once: number of real ranks of the emulated job, which run concurrently like all ranks of the real job.
    """
    between = links.near if layout.sites else links.local
    setting = Setting(
        delays="simulate",
        per_host=1 if layout.sites else layout.ranks,
        inside=links.local,
        between=between,
        what_if=layout.what_if,
    )
    case = layout.case(links, steps, work)
    limit_s = rounds * TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="weft-emulation-") as folder:
        config = layout.config(folder, timeout_s=TIMEOUT_S)
        job = LayersJob(case, config)
        with emulated(job, layout.ranks, setting, at_once=at_once) as measure:
            turns = Turns(Path(folder), rounds, lambda: measure(steps))
            given = case, config, layout.slow, Path(folder), rounds
            if layout.sites:
                with NetBed.up(layout.topology()) as bed:
                    measured = run_ranks_in(bed, bed.nodes, real_rounds, *given, timeout_s=limit_s, meanwhile=turns)
            else:
                measured = run_ranks(layout.ranks, real_rounds, *given, timeout_s=limit_s, meanwhile=turns)
    real_s = [median(map(median, each)) for each in zip(*measured, strict=True)]
    return Beside(layout.name, layout.ranks, real_s, turns.emulated_s)


def real_rounds(
    case: EngineCase, config: WeftConfig, slow: tuple[int, float] | None, folder: Path, rounds: int
) -> list[tuple[float, ...]]:
    """Return, by round, the seconds of the measured steps on one rank of the real job."""
    engine = emulated_engine(case, config)
    if slow is not None and engine.global_rank == slow[0]:
        set_speed(engine, case.work, slow[1])
    turns = Turns(folder, rounds, _nothing)
    engine.train_batch()  # the first makes buffers
    found = []
    for number in range(rounds):
        turns.wait(number)
        found.append(time_steps(case, engine.train_batch))
    engine.destroy()
    return found


def _nothing() -> Emulation:
    raise AssertionError("real ranks emulate nothing")


def main(argv: Sequence[str]) -> int:
    """Run ``[--parts PART ...] [--jobs NAME ...] ...`` and return 1 if an error exceeds its goal or cannot be shown.

    Real and emulated steps of a job alternate.
    """
    args = parse(_parser(), argv, parts=PARTS, jobs=[layout.name for layout in LAYOUTS], what_ifs=list(CHANGES))
    if not 0 < args.layer_ms <= 1000:
        raise ValueError(f"--layer-ms {args.layer_ms}: give milliseconds above 0 and at most 1000")
    changes = [CHANGES[name] for name in args.what_ifs or CHANGES if "what-ifs" in args.parts]
    jobs = [each for each in LAYOUTS if "jobs" in args.parts and each.name in (args.jobs or [each.name])]
    changed = list(dict.fromkeys(layout for pair in changes for layout in pair))
    work = work_of_layers(args.layer_ms)
    links = _links([*jobs, *changed], work)
    found: dict[str, Beside] = {}
    for layout in (*jobs, *changed):
        if layout.name not in found:
            found[layout.name] = compare(layout, links, work, args.rounds, args.steps, args.at_once)
            print(*_row(found[layout.name]).values(), sep=", ", flush=True)
            write_json(args, "emulation", list(found.values()))  # at once: a run of many jobs may be cut short
    besides = [found[layout.name] for layout in jobs]
    if jobs:
        show(table_of(map(_row, besides), "A step emulated and real"))
        print(*(f"within {goal:.1%}: {sum(_within(each, goal) for each in besides)} of {len(jobs)}" for goal in GOALS))
    if changes:
        pairs = [(found[before.name], found[after.name]) for before, after in changes]
        show(table_of((_change_row(*pair) for pair in pairs), "What a change does to the step"))
    usual, most = ([_within(each, goal) for each in besides] for goal in GOALS)
    return finish(args, "emulation", list(found.values()), met=all(most) and 4 * sum(usual) >= 3 * len(jobs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks emulation", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    names = ", ".join(layout.name for layout in LAYOUTS)
    parser.add_argument("--jobs", nargs="*", metavar="NAME", help=f"of {names}; default all")
    parser.add_argument("--what-ifs", nargs="*", metavar="NAME", help=f"of {', '.join(CHANGES)}; default all")
    parser.add_argument("--rounds", type=int, default=2, help="real and emulated runs of each, in one start")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    parser.add_argument("--layer-ms", type=float, default=LAYER_MS, help="of a layer's forward and of each gradient")
    parser.add_argument("--at-once", type=int, default=2, help="an emulation's real ranks that run side by side")
    return parser


def _links(layouts: Sequence[Layout], work: EmulatedWork) -> Links:
    """Return the links of these jobs, measured between pauses as long as a layer, and on a netbed between sites."""
    local = measure_link(work.hidden_bytes, Way.shared, idle_s=work.forward_s)
    apart = any(layout.sites for layout in layouts)
    return replace(measured_links(wan_topology((2, 1)), work) if apart else Links(), local=local)


def _row(beside: Beside) -> dict[str, object]:
    return {
        "job": beside.name,
        "ranks": beside.ranks,
        "real": f"{1e3 * median(beside.real_s):.1f} ms",
        "runs differ": f"{beside.own:.2%}",
        "emulated": f"{1e3 * median(beside.emulated_s):.1f} ms",
        "error": f"{beside.error:+.2%}",
        f"within {GOAL:.1%}": _verdict(beside, GOAL),
        f"within {MOST:.1%}": _verdict(beside, MOST),
    }


def _change_row(before: Beside, after: Beside) -> dict[str, object]:
    real = median(after.real_s) / median(before.real_s) - 1
    emulated = median(after.emulated_s) / median(before.emulated_s) - 1
    return {
        "what if": after.name,
        "ranks": after.ranks,
        "real before": f"{1e3 * median(before.real_s):.1f} ms",
        "real after": f"{1e3 * median(after.real_s):.1f} ms",
        "real change": f"{real:+.2%}",
        "predicted change": f"{emulated:+.2%}",
        "off by": f"{100 * (emulated - real):+.2f} points",
        "runs differ": f"{max(before.own, after.own):.2%}",
    }


def _verdict(beside: Beside, goal: float) -> str:
    if beside.own > MOST:
        return f"not shown: real runs differ by {beside.own:.1%}"
    return "yes" if _within(beside, goal) else "no"


def _within(beside: Beside, goal: float) -> bool:
    """True if the error is no larger than the goal, on a machine that was not too busy."""
    return beside.own <= MOST and abs(beside.error) <= goal + beside.own
