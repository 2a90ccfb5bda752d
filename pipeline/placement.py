"""The placement: which rank holds which virtual stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from weft.pipeline.limits import MOST_LEGS, MOST_RANKS, short_repr

LAYOUTS = ("straight", "fold", "interleaved", "site_fold", "site_interleaved")
"""Names of layouts; those of a site go through one site after the other."""


@dataclass(frozen=True)
class Placement:
    """An assignment of virtual stages to ranks.

    One description covers every layout: the stages visit the ranks of a group (a site, or all
    ranks) once per leg, downwards (``d``) or upwards (``u``), and each visit is one virtual stage.
    A micro-batch leaves a group only after all legs of the group.

    ==============  =================  ======
    layout          groups             legs
    ==============  =================  ======
    straight        ``(P,)``           ``d``
    interleaved x2  ``(P,)``           ``dd``
    fold            ``(P,)``           ``du``
    site fold       ``(P1, P2, ...)``  ``du``
    ==============  =================  ======

    Attributes:
        groups: ranks per group; ranks are numbered group by group.
        legs: one letter per pass through a group.
        sites: ranks per site, in rank order; decides which hops cross the WAN.
        pipelines: number of replicas of this layout, as in a DP-cell (Atlas section 4.4). Each has
            its own ranks and virtual stages, numbered after those of the previous one.
    """

    groups: tuple[int, ...]
    legs: str
    sites: tuple[int, ...]
    pipelines: int = 1

    def __post_init__(self) -> None:
        for name, sizes in (("groups", self.groups), ("sites", self.sites)):
            if not sizes or min(sizes) < 1:
                raise ValueError(f"placement.{name}={short_repr(sizes)}: every entry must be at least 1 rank")
        if not self.legs or set(self.legs) - {"d", "u"}:
            raise ValueError(
                f"placement.legs={short_repr(self.legs)}: use one letter per leg, d (down) or u (up), as in 'du'"
            )
        if sum(self.sites) != sum(self.groups):
            raise ValueError(
                f"placement.sites={short_repr(self.sites)}: they hold {sum(self.sites)} ranks, the pipeline has "
                f"{sum(self.groups)}; make them equal"
            )
        if self.pipelines < 1:
            raise ValueError(f"placement.pipelines={self.pipelines}: a cell has at least 1 pipeline")
        if len(self.legs) > MOST_LEGS:
            raise ValueError(f"placement.legs: {len(self.legs)} legs, more than {MOST_LEGS}; use fewer")
        if self.num_ranks > MOST_RANKS:
            raise ValueError(f"placement.groups: {self.num_ranks} ranks, more than {MOST_RANKS}; use fewer")

    @classmethod
    def named(cls, layout: str, num_ranks: int, sites: tuple[int, ...] = (), chunks: int = 2) -> Placement:
        """Create one of `LAYOUTS`; unless it is straight, each rank gets ``chunks`` virtual stages."""
        legs = {"straight": "d", "interleaved": "d" * chunks, "fold": ("du" * chunks)[:chunks]}
        sites = sites or (num_ranks,)
        return cls(sites if layout.startswith("site_") else (num_ranks,), legs[layout.removeprefix("site_")], sites)

    @classmethod
    def straight(cls, num_ranks: int, sites: tuple[int, ...] = ()) -> Placement:
        """Create the placement with stage i on rank i."""
        return cls((num_ranks,), "d", sites or (num_ranks,))

    @classmethod
    def interleaved(cls, num_ranks: int, chunks: int, sites: tuple[int, ...] = ()) -> Placement:
        """Place stage i on rank i mod P, with ``chunks`` stages per rank (Megatron's virtual pipeline)."""
        return cls((num_ranks,), "d" * chunks, sites or (num_ranks,))

    @classmethod
    def fold(cls, num_ranks: int, legs: int = 2, sites: tuple[int, ...] = ()) -> Placement:
        """Create the placement with stages r and 2P-1-r on rank r of P (DHelix section 4.1); more legs fold again."""
        return cls((num_ranks,), ("du" * legs)[:legs], sites or (num_ranks,))

    @classmethod
    def site_fold(cls, sites: tuple[int, ...], legs: int = 2) -> Placement:
        """Create a fold inside each site, so that each pass crosses each WAN boundary once."""
        return cls(sites, ("du" * legs)[:legs], sites)

    @classmethod
    def infer(cls, stage_ranks: tuple[int, ...]) -> Placement:
        """Return the placement with these ``stage_ranks``; if it has several groups, each becomes a site.

        Raises:
            ValueError: no placement visits the ranks in this order.
        """
        num_ranks = max(stage_ranks) + 1
        num_legs, rest = divmod(len(stage_ranks), num_ranks)
        for groups in ((num_ranks,), _finest_groups(stage_ranks, num_legs)) if not rest else ():
            if sum(groups) == num_ranks:
                placement = cls(groups, _legs(stage_ranks, groups, num_legs), groups)
                if placement.stage_ranks == stage_ranks:
                    return placement
        raise ValueError(
            f"stages on ranks {stage_ranks}: not a supported placement; stages must visit each group of ranks once per "
            f"leg, down or up, as in 0,1,2,3 (straight), 0,1,0,1 (interleaved) or 0,1,1,0 (fold)"
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks over all pipelines."""
        return self.pipelines * sum(self.groups)

    @property
    def num_stages(self) -> int:
        """Number of virtual stages over all pipelines."""
        return self.num_ranks * len(self.legs)

    @property
    def single(self) -> Placement:
        """The placement of one pipeline."""
        return self.of_pipelines(1)

    def of_pipelines(self, pipelines: int) -> Placement:
        """Return the placement with this number of pipelines."""
        return self if pipelines == self.pipelines else replace(self, pipelines=pipelines)

    def is_first(self, stage: int) -> bool:
        """True if ``stage`` is the first of its pipeline."""
        return stage % (self.num_stages // self.pipelines) == 0

    def is_last(self, stage: int) -> bool:
        """True if ``stage`` is the last of its pipeline."""
        return self.is_first(stage + 1)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each virtual stage, in stage order."""
        order: list[int] = []
        first = 0
        for size in self.groups:
            ranks = range(first, first + size)
            for leg in self.legs:
                order.extend(ranks if leg == "d" else reversed(ranks))
            first += size
        return tuple(pipeline * first + rank for pipeline in range(self.pipelines) for rank in order)

    @cached_property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stages of each rank, in ascending order."""
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.stage_ranks):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @cached_property
    def rank_sites(self) -> tuple[int, ...]:
        """The site of each rank."""
        return tuple(site for site, size in enumerate(self.sites) for _ in range(size)) * self.pipelines

    def crosses_wan(self, stage: int) -> bool:
        """True if the hop from ``stage`` to ``stage + 1`` of its pipeline joins two sites."""
        here, there = self.stage_ranks[stage], self.stage_ranks[stage + 1]
        return self.rank_sites[here] != self.rank_sites[there]


def _finest_groups(stage_ranks: tuple[int, ...], num_legs: int) -> tuple[int, ...]:
    """Return the sizes of the smallest groups of ranks that finish all their legs before the next group starts."""
    sizes: list[int] = []
    first = position = 0
    size = 1
    while position + size * num_legs <= len(stage_ranks):
        visited = stage_ranks[position : position + size * num_legs]
        if set(visited) == set(range(first, first + size)):
            sizes.append(size)
            position, first, size = position + size * num_legs, first + size, 0
        size += 1
    return tuple(sizes)


def _legs(stage_ranks: tuple[int, ...], groups: tuple[int, ...], num_legs: int) -> str:
    """Return the direction of each leg in the largest group; directions alternate if no group has two ranks."""
    largest = max(range(len(groups)), key=groups.__getitem__)
    size, start = groups[largest], sum(groups[:largest]) * num_legs
    if size == 1:
        return ("du" * num_legs)[:num_legs]
    legs = range(start, start + size * num_legs, size)
    return "".join("d" if stage_ranks[at] < stage_ranks[at + 1] else "u" for at in legs)
