"""The layouts: one emulated model and batch over one to three sites, and what each is as a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.conf.schema import (
    ClusterConfig,
    CommConfig,
    DataConfig,
    OptimizerConfig,
    PipelineConfig,
    PlacementKind,
    ScheduleKind,
    SiteConfig,
    WeftConfig,
    ZeroConfig,
)

NUM_LAYERS = 8
MICROBATCHES = 12
"""Of a step, over all replicas."""


@dataclass(frozen=True, kw_only=True)
class EmulatedLayout:
    """One way to lay the model out.

    Attributes:
        sites: pipeline ranks at each site.
        replicas: of the pipeline.
        layers: of each virtual stage; empty is even.
        cell: replicas that share their uplinks.
    """

    sites: tuple[int, ...]
    replicas: int = 1
    placement: str = "straight"
    schedule: str = "auto"
    layers: tuple[int, ...] = ()
    cell: int = 1
    zero: int = 0

    @property
    def stages(self) -> int:
        """Pipeline ranks."""
        return sum(self.sites)

    @property
    def microbatches(self) -> int:
        """Of a replica."""
        return MICROBATCHES // self.replicas

    @property
    def name(self) -> str:
        """For a table."""
        return "; ".join(self._words())

    def _words(self) -> Iterator[str]:
        yield f"{len(self.sites)} site{'s' * (len(self.sites) > 1)} of {' + '.join(map(str, self.sites))}"
        yield f"{self.placement.replace('_', ' ')} {self.schedule}"
        if self.layers:
            yield f"layers {' '.join(map(str, self.layers))}"
        if self.replicas > 1:
            yield f"{self.replicas} replicas"
        if self.cell > 1:
            yield f"cell of {self.cell}"
        if self.replicas > 1:
            yield f"ZeRO-{self.zero}"

    def config(self, comm: CommConfig, cache_dir: str) -> WeftConfig:
        """What `emulated_engine` takes; the schedule is not searched for by the clock."""
        sites = [SiteConfig(name=f"site {number}", ranks=ranks) for number, ranks in enumerate(self.sites)]
        return WeftConfig(
            cluster=ClusterConfig(sites=sites if len(sites) > 1 else []),
            pipeline=PipelineConfig(
                stages=self.stages,
                schedule=ScheduleKind[self.schedule],
                placement=PlacementKind[self.placement],
                microbatches=self.microbatches,
                layers=list(self.layers),
                search_seconds=0.0,
            ),
            comm=replace(comm, cell=self.cell),
            zero=ZeroConfig(stage=self.zero),
            optimizer=OptimizerConfig(clip=0.0),  # the norm would end every step with a crossing of the WAN
            data=DataConfig(cache_dir=cache_dir),
        )


LAYOUTS = (
    EmulatedLayout(sites=(4,), schedule="1f1b"),
    EmulatedLayout(sites=(4,), placement="fold"),
    EmulatedLayout(sites=(4,), layers=(1, 2, 3, 2)),
    EmulatedLayout(sites=(2,), replicas=2, zero=1),
    EmulatedLayout(sites=(2, 2)),
    EmulatedLayout(sites=(2, 2), placement="fold"),
    EmulatedLayout(sites=(2, 2), placement="site_fold"),
    EmulatedLayout(sites=(2, 2), replicas=2, cell=2, zero=1),
    EmulatedLayout(sites=(3, 1), layers=(3, 2, 2, 1), replicas=2, zero=2),
    EmulatedLayout(sites=(1, 2, 1), schedule="1f1b"),
    EmulatedLayout(sites=(1, 2, 1), replicas=3, cell=3, zero=2),
    EmulatedLayout(sites=(1, 1, 1), layers=(3, 2, 3), replicas=3, cell=3),
)
"""All of them train the same layers on the same micro-batches, so that their steps can be ranked."""

PROFILED = EmulatedLayout(sites=(4,), layers=(1, 3, 3, 1))
"""Measured before the others, for what stages of few and of many layers take."""
