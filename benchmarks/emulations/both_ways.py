"""One job, real and emulated, in turns: both start once, and each is stopped while the other trains."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import sleep

import torch.distributed as dist

from benchmarks.emulations.layouts import TIMEOUT_S
from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_job import LayersJob
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import Layout, Links
from benchmarks.peers.stepping import time_steps
from benchmarks.peers.weft_engine import emulated_engine
from weft.conf.schema import WeftConfig
from weft.recipes.emulation.session import Setting
from weft.recipes.emulation.turns import Emulation, emulated
from weft.tools.netbed import NetBed
from weft.tools.ranks import run_ranks

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
    work = case.work
    if slow is not None and int(os.environ["RANK"]) == slow[0]:
        times = {name: getattr(work, name) / slow[1] for name in ("forward_s", "input_s", "weight_s")}
        work = replace(work, **times)
    engine = emulated_engine(case, config, work=work)
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
