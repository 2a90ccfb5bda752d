"""The layout: the placement of a model on sites and GPUs, and its predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, Self

from weft.pipeline.memory import RankMemory
from weft.pipeline.placement import Placement

LEGS = {"straight": "d", "fold": "du", "site_fold": "du", "site_interleaved": "dd"}
"""Placements that plans compare, and their passes: through all ranks in a plain fold, else through those of a site."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layout without its sites, layers and DP-cells.

    Attributes:
        num_stages: pipeline ranks.
        replicas: number of pipelines.
        tensor, context, expert: numbers of GPUs that share a layer's weights, a sequence, the experts. GPUs that share
            experts are neighbours in any replica, and GPUs that share weights are neighbours among those.
        microbatches: micro-batches per step and replica.
        checkpointing: True if backwards compute their forwards again.
        arrangement: arrangement of virtual stages on ranks, one of `LEGS`.
        routes: number of sets of replicas; all sets are equally large, and each goes through its own sites.
    """

    num_stages: int
    replicas: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    microbatches: int
    microbatch_size: int = 1
    zero_stage: int = 1
    checkpointing: bool = False
    arrangement: str = "straight"
    routes: int = 1

    def changed(self, **fields: Any) -> Self:
        """Return ``dataclasses.replace(self, **fields)``, without its checks, which take most of its time."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), **fields)
        return other

    @property
    def legs(self) -> str:
        """Passes through the ranks; each pass is one virtual stage on every rank. See `Placement`."""
        return LEGS[self.arrangement]

    @property
    def crossings(self) -> int:
        """Number of times that a micro-batch's forward crosses each border between sites; equal for the backward."""
        return len(self.legs) if self.arrangement == "fold" else 1

    def placed(self, stages: tuple[int, ...]) -> Placement:
        """Return the placement of one pipeline with ``stages`` ranks at each site."""
        return _placed(self.arrangement, self.num_stages, stages)

    @property
    def virtual_stages(self) -> int:
        """The number of parts into which the layers are cut."""
        return self.num_stages * len(self.legs)

    @property
    def gpus_per_rank(self) -> int:
        """The number of GPUs of one pipeline rank of one replica."""
        return self.tensor * self.context

    @property
    def lines(self) -> int:
        """The number of GPUs of each pipeline rank, over all replicas."""
        return self.replicas * self.gpus_per_rank

    @property
    def replicas_of_route(self) -> int:
        """The number of replicas that go through the same sites."""
        return self.replicas // self.routes

    @property
    def lines_of_route(self) -> int:
        """The number of GPUs of each pipeline rank, over the replicas of one route."""
        return self.replicas_of_route * self.gpus_per_rank

    @property
    def may_pool(self) -> bool:
        """True if replicas may pool their uplinks in a DP-cell.

        In a cell pipelines send in turns, whereas GPUs that share a layer send at the same time. Cells are compared
        only if all pipelines go through the same sites.
        """
        return self.gpus_per_rank == self.expert == self.routes == 1

    @property
    def gpus(self) -> int:
        """The number of GPUs of all replicas."""
        return self.num_stages * self.replicas * self.gpus_per_rank

    @property
    def sequences(self) -> int:
        """The number of sequences of a step."""
        return self.replicas * self.microbatches * self.microbatch_size


@lru_cache(maxsize=4096)
def _placed(arrangement: str, num_ranks: int, stages: tuple[int, ...]) -> Placement:
    """Return `Placement.named`; layouts of equal stages share one placement, and what it has computed."""
    return Placement.named(arrangement, num_ranks, stages)


@dataclass(frozen=True, kw_only=True)
class Layout(Shape):
    """A complete way to train: a shape with its sites, layers and DP-cells.

    Attributes:
        sites: numbers of the sites used, in pipeline order, route after route.
        stages: for each entry of ``sites``, its number of pipeline ranks.
        layers: number of decoder layers of each virtual stage.
        cell: number of replicas that pool their uplinks (Atlas section 4.4); the last cell may hold fewer.
        connections: TCP connections per hop between sites.
    """

    sites: tuple[int, ...]
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    cell: int = 1
    schedule: str = "auto"
    connections: tuple[int, ...] = ()

    @property
    def ways(self) -> list[Layout]:
        """The layout of each route: with the sites of this route alone."""
        if self.routes == 1:
            return [self]
        found, first, held = [], 0, 0
        for place, stages in enumerate(self.stages, start=1):
            held += stages
            if held % self.num_stages == 0:
                found.append(self.changed(sites=self.sites[first:place], stages=self.stages[first:place]))
                first = place
        return found

    @property
    def links(self) -> list[tuple[int, int]]:
        """Pairs of sites that exchange data, through a pipeline's hop or through a reduction among replicas."""
        hops = [pair for way in self.ways for pair in pairwise(way.sites)]
        together = zip(*(way.site_of() for way in self.ways), strict=True)
        pairs = [*hops, *(pair for at in together for pair in combinations(at, 2))]
        return list({frozenset(pair): pair for pair in pairs}.values())

    @property
    def placement(self) -> Placement:
        """The placement of a whole DP-cell, on the route with the most sites."""
        way = max(self.ways, key=lambda way: len(way.sites))
        return self.placed(way.stages).of_pipelines(self.cell)

    @property
    def cells(self) -> list[Placement]:
        """The placements of its DP-cells; the last one holds the remaining replicas."""
        sizes = {self.cell, self.replicas % self.cell or self.cell}
        placement = self.placement
        return [placement.of_pipelines(size) for size in sorted(sizes, reverse=True)]

    def site_of(self) -> list[int]:
        """Return the site of each pipeline rank, route after route."""
        return [site for site, held in zip(self.sites, self.stages, strict=True) for _ in range(held)]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for a layout.

    Attributes:
        step_s: seconds of a step: the pipeline, collectives over replicas, the optimiser.
        bound_s: lower bound of a step of this layout.
        busy_s: seconds for which a GPU computes, on average.
        mfu: share of the GPUs' peak that the model's own operations reach.
        memory: bytes of the fullest GPU; ``memory_share`` is its share of the device's memory.
        cap_bytes: limit on the saved activations of any rank.
        wan_bytes: bytes that leave sites in a step.
        binds: the bottleneck.
    """

    layout: Layout
    step_s: float
    bound_s: float
    pipeline_s: float
    collective_s: float
    optimizer_s: float
    busy_s: float
    tokens: int
    mfu: float
    memory: RankMemory
    memory_share: float
    cap_bytes: float
    wan_bytes: float
    price_per_hour: float
    egress_per_step: float
    binds: str

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of all replicas."""
        return self.tokens / self.step_s

    @property
    def bubble_share(self) -> float:
        """The share of a step in which GPUs do not compute."""
        return max(0.0, 1 - self.busy_s / self.step_s)

    @property
    def cost_per_step(self) -> float:
        """The cost of the GPUs' time and of the bytes that leave sites."""
        return self.price_per_hour * self.step_s / 3600 + self.egress_per_step

    def hours(self, tokens: float) -> float:
        """Return the hours to train on ``tokens`` tokens."""
        return tokens / self.tokens_per_s / 3600

    def cost(self, tokens: float) -> float:
        """Return the cost of training on ``tokens`` tokens."""
        return tokens / self.tokens * self.cost_per_step
