"""`weft bench cuts`: cut the WAN of a training run, and time how soon after healing a step is usual again."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic

import torch.distributed as dist

from weft.comm.wan import library
from weft.conf import load
from weft.conf.schema import WeftConfig
from weft.conf.sites import ranks_per_site
from weft.engine.emulation.stage import EmulatedWork
from weft.pipeline.costs import LinkCost
from weft.tools.benchmarks.peers.case import EngineCase
from weft.tools.benchmarks.peers.weft_engine import emulated_engine
from weft.tools.benchmarks.results import parse, write_json
from weft.tools.netbed import NetBed, Topology
from weft.tools.netbed.ranks import run_ranks_in
from weft.tools.tables import show, table_of

USUAL = 1.1
"""Times the median of the undisturbed steps."""
GOAL_S = 1.0
_WARM_STEPS = 4  # while connections and the pace of the links grow
_APART_STEPS = 12  # between two cuts
_SETTLED_S = 2.0  # after a cut: steps from then on are undisturbed
_STAGES, _MICROBATCHES = 4, 4
_WORK = EmulatedWork(forward_s=0.01, input_s=0.01, weight_s=0.01, hidden_bytes=256 << 10)


@dataclass(frozen=True)
class Cut:
    """One cut of every line between sites.

    Attributes:
        lasted_s: its length.
        healed_s: when it was over, on the clock of `time.monotonic`.
    """

    lasted_s: float
    healed_s: float

    def usual_again_s(self, ends_s: Sequence[float], usual_s: float) -> float:
        """Seconds from healing until the first step begins that takes the usual time; infinite if none does.

        The step that the cut held up is none: it began before.
        """
        for begin_s, end_s in pairwise(ends_s):
            if (
                begin_s >= self.healed_s - self.lasted_s
                and end_s > self.healed_s
                and end_s - begin_s <= USUAL * usual_s
            ):
                return max(0.0, begin_s - self.healed_s)
        return float("inf")

    def lost_s(self, ends_s: Sequence[float], usual_s: float) -> float:
        """Seconds by which the steps around the cut took longer than usual, all together."""
        return sum(end_s - begin_s - usual_s for begin_s, end_s in pairwise(ends_s) if self.disturbs(begin_s, end_s))

    def disturbs(self, begin_s: float, end_s: float) -> bool:
        """Whether a step from ``begin_s`` to ``end_s`` is one of those around the cut."""
        return end_s > self.healed_s - self.lasted_s and begin_s < self.healed_s + _SETTLED_S


def main(argv: Sequence[str]) -> int:
    """Run ``weft bench cuts ...``; returns 1 if the median of a length of cuts misses the goal."""
    args = parse(_parser(), argv)
    library.load()  # compiled here, not in every rank at once
    lengths_s = [length_s for _ in range(args.times) for length_s in args.seconds]
    config = load(
        [
            "cluster=two_sites",
            f"pipeline.stages={_STAGES}",
            f"comm.connections={args.connections}",
            f"comm.deadline_s={2 * max(lengths_s) + 20:g}",
            "pipeline.schedule=1f1b",
            f"pipeline.microbatches={_MICROBATCHES}",
        ]
    )
    topology = Topology.of_cluster(config.cluster, name=f"cuts{os.getpid()}")
    num_steps = _WARM_STEPS + _APART_STEPS * (len(lengths_s) + 1)
    with tempfile.TemporaryDirectory() as folder, NetBed.up(topology) as bed:
        cutter = _Cutter(bed, topology.sites, lengths_s, Path(folder, "steps"))
        ends_s = run_ranks_in(
            bed,
            bed.nodes,
            _train,
            config,
            num_steps,
            cutter.file,
            timeout_s=120 + 3 * num_steps + 2 * sum(lengths_s),
            meanwhile=cutter.watch,
        )
    return _report(args, cutter.cuts, ends_s)


def _report(args: argparse.Namespace, cuts: Sequence[Cut], ranks: Sequence[Sequence[float]]) -> int:
    steps = [pair for ends_s in ranks for pair in pairwise(ends_s[_WARM_STEPS:])]
    usual_s = median(end_s - begin_s for begin_s, end_s in steps)
    undisturbed = [pair for pair in steps if not any(cut.disturbs(*pair) for cut in cuts)]
    ordinary = sum(end_s - begin_s <= USUAL * usual_s for begin_s, end_s in undisturbed) / max(1, len(undisturbed))
    found = [
        {
            "cut s": cut.lasted_s,
            "usual again after s": max(cut.usual_again_s(ends_s, usual_s) for ends_s in ranks),
            "lost besides s": max(cut.lost_s(ends_s, usual_s) for ends_s in ranks) - cut.lasted_s,
        }
        for cut in cuts
    ]
    medians_s = {
        length_s: median(one["usual again after s"] for one in found if one["cut s"] == length_s)
        for length_s in args.seconds
    }
    show(
        table_of((_row(length_s, found) for length_s in args.seconds), f"a step takes {usual_s:.3f} s"),
        f"of the steps that no cut disturbed, {ordinary:.0%} took at most {USUAL:g} times as long; where that is not "
        "nearly all, the machine holds up steps as well",
    )
    met = max(medians_s.values()) <= GOAL_S
    write_json(args, "cuts", found, met=met)
    return 0 if met else 1


def _row(length_s: float, found: Sequence[dict[str, float]]) -> dict[str, str]:
    mine = [one for one in found if one["cut s"] == length_s]
    cells = {"cut s": f"{length_s:g}", "cuts": str(len(mine))}
    for figure in ("usual again after s", "lost besides s"):
        values = [one[figure] for one in mine]
        cells[figure] = f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return cells


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft bench cuts", description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 5.0, 20.0], help="lengths of the cuts")
    parser.add_argument("--times", type=int, default=4, help="cuts of each length")
    parser.add_argument("--connections", type=int, default=4, help="per link")
    return parser


class _Cutter:
    """Cuts the lines once steps are usual: each cut `_APART_STEPS` steps after the one before it."""

    def __init__(self, bed: NetBed, sites: Sequence[str], lengths_s: Sequence[float], file: Path) -> None:
        self.file, self.cuts = file, list[Cut]()
        self._bed, self._sites, self._lengths_s = bed, sites, lengths_s

    def watch(self) -> None:
        """Look how far rank 0 is, whose file has a byte for each step."""
        done = self.file.stat().st_size if self.file.exists() else 0
        number = len(self.cuts)
        if number == len(self._lengths_s) or done < _WARM_STEPS + _APART_STEPS * (number + 1):
            return
        length_s = self._lengths_s[number]
        for site in self._sites[1:]:
            self._bed.cut(site, for_s=length_s)
        self.cuts.append(Cut(length_s, monotonic() + length_s))


def _train(config: WeftConfig, num_steps: int, file: Path) -> list[float]:
    """One rank of emulated layers; returns when each step ended."""
    (link,) = config.cluster.links
    case = EngineCase(
        num_ranks=_STAGES,
        num_layers=_STAGES,
        num_microbatches=_MICROBATCHES,
        work=_WORK,
        sites=ranks_per_site(config),
        wan=LinkCost(latency_s=link.latency_ms / 1e3, bandwidth_bps=link.bandwidth_mbps * 1e6),
    )
    engine = emulated_engine(case, config)
    ends_s = []
    with open(file if dist.get_rank() == 0 else os.devnull, "wb", buffering=0) as steps:
        for _ in range(num_steps):
            engine.train_batch()
            ends_s.append(monotonic())
            steps.write(b".")
    engine.destroy()
    return ends_s
