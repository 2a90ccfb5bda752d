"""What supervision costs a run: its steps with everything that watches over them, and without, by turns."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import sleep

import psutil

from benchmarks.survival.hosts import LocalHosts
from benchmarks.survival.run import SupervisedRun
from benchmarks.survival.session import running

SETTINGS = (
    "recipe=quickstart",
    "cluster.master_port=29519",
    "pipeline.stages=2",
    "pipeline.microbatches=8",
    "model.overrides.hidden_size=128",
    "model.overrides.intermediate_size=256",
    "model.overrides.num_hidden_layers=4",
    "model.self_check=false",
    "train.steps=1000000",
    "train.max_seconds=0",
    "train.export=false",
    "train.timeline=false",
    "train.sample=''",
    "checkpoint.every=0",
    "logging.progress=false",
    "supervise.silence_s=600",  # those who watch are stopped half of the time, and should not mind
    "supervise.least_deadline_s=600",
)
HOSTS = {"east0": 1, "west0": 1}
TURN_S = 8.0
GOAL = 0.003
"""Most that a step may take longer."""
_RESAMPLED = 2000


@dataclass(frozen=True)
class Cost:
    """Of the steps of a run, by turns.

    Attributes:
        on_s, off_s: seconds of each step.
        ratio: of a turn's median step with to that of the turn without beside it, the median.
        low, high: between which that lies with 95 % (bootstrap over pairs of turns).
        watchers_cpu_s: processor seconds of driver and agents per step, with.
        ranks_cpu_on_s, ranks_cpu_off_s: of all ranks per step.
    """

    on_s: list[float]
    off_s: list[float]
    ratio: float
    low: float
    high: float
    watchers_cpu_s: float
    ranks_cpu_on_s: float
    ranks_cpu_off_s: float

    @property
    def rows(self) -> list[dict[str, str]]:
        """For a table."""
        cpu_s = self.watchers_cpu_s + max(0.0, self.ranks_cpu_on_s - self.ranks_cpu_off_s)
        return [
            {"": "step with supervision", "usual": _spread(self.on_s)},
            {"": "step without", "usual": _spread(self.off_s)},
            {
                "": "with / without, of neighbouring turns",
                "usual": f"{self.ratio:.4f} ({self.low:.4f} to {self.high:.4f})",
            },
            {"": "driver and agents, processor time per step", "usual": f"{1e3 * self.watchers_cpu_s:.2f} ms"},
            {"": "ranks, processor time per step, with", "usual": f"{1e3 * self.ranks_cpu_on_s:.2f} ms"},
            {"": "ranks, processor time per step, without", "usual": f"{1e3 * self.ranks_cpu_off_s:.2f} ms"},
            {"": "all that watching takes / processor time of a step", "usual": f"{cpu_s / self.ranks_cpu_off_s:.3%}"},
        ]


@dataclass
class _Turn:
    """Steps that began and ended while supervision was on, or off."""

    steps_s: list[float]
    ranks_cpu_s: float
    watchers_cpu_s: float


def measure(folder: Path, minutes: float, overrides: Sequence[str] = ()) -> Cost:
    """Turns of `TURN_S` each for so long.

    Raises:
        RuntimeError: the run has ended.
    """
    turns: dict[bool, list[_Turn]] = {True: [], False: []}
    with running(folder, [*SETTINGS, *overrides], lambda path: LocalHosts(path, HOSTS)) as run:
        run.wait_for_step(12, timeout_s=300.0)
        limit = time.monotonic() + 60.0 * minutes
        while time.monotonic() < limit or len(turns[True]) < 2:
            for on in random.sample((True, False), 2):  # so that nothing periodic falls into one kind of turn
                _switch(run, on)
                turns[on].append(_turn(run))
        _switch(run, True)
    pairs = [
        median(on.steps_s) / median(off.steps_s)
        for on, off in zip(turns[True], turns[False], strict=True)
        if on.steps_s and off.steps_s
    ]
    found = sorted(median(random.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLED))
    numbers = {on: sum(len(turn.steps_s) for turn in turns[on]) for on in turns}
    return Cost(
        on_s=[step for turn in turns[True] for step in turn.steps_s],
        off_s=[step for turn in turns[False] for step in turn.steps_s],
        ratio=median(pairs),
        low=found[len(found) // 40],
        high=found[-len(found) // 40],
        watchers_cpu_s=sum(turn.watchers_cpu_s for turn in turns[True]) / numbers[True],
        ranks_cpu_on_s=sum(turn.ranks_cpu_s for turn in turns[True]) / numbers[True],
        ranks_cpu_off_s=sum(turn.ranks_cpu_s for turn in turns[False]) / numbers[False],
    )


def _turn(run: SupervisedRun) -> _Turn:
    """A turn, from the end of a step to the end of another."""
    ranks, watchers = [rank.pid for rank in run.ranks()], [process.pid for process in _watchers(run)]
    run.wait_for_step(run.step + 2)
    first, cpu_s, watched_s = run.step, _cpu_s(ranks), _cpu_s(watchers)
    sleep(TURN_S)
    run.wait_for_step(run.step + 1)
    last, spent_s, watching_s = run.step, _cpu_s(ranks) - cpu_s, _cpu_s(watchers) - watched_s
    seconds = run.step_seconds()
    return _Turn([seconds[step] for step in range(first + 1, last + 1)], spent_s, watching_s)


def _switch(run: SupervisedRun, on: bool) -> None:
    """Have ranks tell where they are, and those who watch look at it; or neither."""
    if not on:
        for process in _watchers(run):
            process.send_signal(signal.SIGSTOP)
    for rank in run.ranks():
        run.order(rank.rank, "watch", on=on)
    run.wait_for(lambda: not [path for path in run.orders.iterdir() if path.name.isdigit()], "orders to be taken")
    if on:
        run.wait_for_step(run.step + 2)  # so that nobody seems to have stood still
        for process in _watchers(run):
            process.send_signal(signal.SIGCONT)


def _watchers(run: SupervisedRun) -> list[psutil.Process]:
    return [psutil.Process(run.process.pid), *run.agents(tuple(HOSTS))]


def _cpu_s(pids: Sequence[int]) -> float:
    """Processor time of processes, in nanoseconds' resolution (Linux: clock_getcpuclockid)."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _spread(found: Sequence[float]) -> str:
    low, middle, high = (1e3 * each for each in quantiles(found, n=4))
    return f"{middle:.2f} ms (quartiles {low:.2f} to {high:.2f}, {len(found)} steps)"
