"""The search, by the simulator, for layouts in which another schedule gains while a rank is slow."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.adapting.disturbance import SITES, SPEED
from benchmarks.peers.layout import NUM_LAYERS
from weft.conf.schema import PipelineConfig, ScheduleKind
from weft.engine.planning.schedules import plan_schedule
from weft.pipeline.choice import placements
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.simulation import simulate

_MICROBATCHES = (4, 8, 12)
_CAPS = (0.5, 0.75, 1.0, 1.5)
"""Caps of a rank's activations, over those of 1F1B."""


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """A layout with the slow rank for which another schedule saves most.

    Attributes:
        cap: cap of a rank's activations over those of 1F1B.
        slow_rank: the slow rank.
        first_s, adapted_s: simulated steps while it is slow, with the first schedule and with the new one.
    """

    placement: str
    microbatches: int
    cap: float
    slow_rank: int
    first_s: float
    adapted_s: float

    @property
    def gain(self) -> float:
        """The share of the step that the new schedule saves."""
        return 1.0 - self.adapted_s / self.first_s


def survey(args: argparse.Namespace) -> list[Surveyed]:
    """Return all layouts of two sites of two ranks, those with the largest gain first."""
    return sorted(_layouts(args), key=lambda layout: layout.gain, reverse=True)


def _layouts(args: argparse.Namespace) -> Iterator[Surveyed]:
    num_ranks = sum(SITES)
    for name, placement in placements(num_ranks, SITES).items():
        each = args.layer / 1e3 * NUM_LAYERS / placement.num_stages
        stage = StageCost(forward_s=each, input_s=each, weight_s=each, activation_bytes=1.0, output_bytes=1.0)
        slow = replace(stage, forward_s=each / SPEED, input_s=each / SPEED, weight_s=each / SPEED)
        usual = CostModel(stages=(stage,) * placement.num_stages, wan=LinkCost(latency_s=args.latency / 1e3))
        for microbatches in _MICROBATCHES:
            for cap in _CAPS:
                config = PipelineConfig(
                    stages=num_ranks,
                    schedule=ScheduleKind["auto"],
                    search_seconds=args.search,
                    memory_cap_bytes=int(cap * placement.num_stages),
                )
                first = plan_schedule(config, placement, num_microbatches=microbatches, costs=usual)
                found = []
                for rank in range(num_ranks):
                    stages = tuple(slow if held == rank else stage for held in placement.stage_ranks)
                    costs = replace(usual, stages=stages)
                    other = plan_schedule(config, placement, num_microbatches=microbatches, costs=costs)
                    found.append(
                        Surveyed(
                            placement=name,
                            microbatches=microbatches,
                            cap=cap,
                            slow_rank=rank,
                            first_s=simulate(first, costs).step_s,
                            adapted_s=simulate(other, costs).step_s,
                        )
                    )
                yield max(found, key=lambda layout: layout.gain)
