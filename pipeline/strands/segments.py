"""Segments of a strand: the compute of a forward or a backward between two collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, reduce
from itertools import repeat


class LinkScope(Enum):
    """The class of links that a collective uses; collectives of different classes do not share links."""

    inside_host = "inside_host"
    between_hosts = "between_hosts"

    __hash__ = object.__hash__


class Kind(Enum):
    """The resource on which a segment spends most of its time. See `OverlapTable`."""

    gemm = "gemm"
    attention = "attention"
    memory = "memory"
    """Norms, activations, copies: bound by memory bandwidth."""

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Segment:
    """Compute, and the collective whose result the next segment of the strand needs.

    Attributes:
        compute_s: seconds of compute alone.
        link: links of the collective, or None if the strand ends without one.
        comm_s: seconds of the collective alone.
    """

    compute_s: float
    link: LinkScope | None = None
    comm_s: float = 0.0
    kind: Kind = Kind.gemm

    def __post_init__(self) -> None:
        for name in ("compute_s", "comm_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"segment.{name}={getattr(self, name)}: must be 0 or more, and finite")
        if self.link is None and self.comm_s:
            raise ValueError(f"segment.comm_s={self.comm_s}: a segment without a link has no collective; set it to 0")


@dataclass(frozen=True)
class WeightGradient:
    """A weight gradient of the backward; it can be deferred, because neither strand needs it.

    Attributes:
        after: index of the backward segment that produces its input.
        compute_s: seconds of its compute.
    """

    after: int
    compute_s: float
    kind: Kind = Kind.gemm


@dataclass(frozen=True)
class Strand:
    """The segments of one pass over a stage's layers, in order."""

    segments: tuple[Segment, ...]

    @property
    def compute_s(self) -> float:
        """Seconds of compute."""
        return sum(segment.compute_s for segment in self.segments)

    @property
    def comm_s(self) -> float:
        """Seconds of collectives."""
        return sum(segment.comm_s for segment in self.segments)

    def then(self, other: Strand) -> Strand:
        """Return this pass followed by another; a last segment without a collective is joined to the other's first."""
        if not self.continues or not other.segments:
            return Strand(self.segments + other.segments)
        (*before, last), (first, *after) = self.segments, other.segments
        kind = max(last, first, key=lambda segment: segment.compute_s).kind
        joined = replace(first, compute_s=last.compute_s + first.compute_s, kind=kind)
        return Strand((*before, joined, *after))

    @property
    def continues(self) -> bool:
        """True if its last segment ends without a collective, so that it is joined to what follows."""
        return bool(self.segments) and self.segments[-1].link is None


@dataclass(frozen=True)
class StrandPair:
    """A forward and a backward that run concurrently.

    Attributes:
        weights: the backward's weight gradients, in the order in which they become possible.
    """

    forward: Strand
    backward: Strand
    weights: tuple[WeightGradient, ...] = ()

    def __post_init__(self) -> None:
        after = [weight.after for weight in self.weights]
        if after != sorted(after) or not all(0 <= index < len(self.backward.segments) for index in after):
            raise ValueError(
                f"weights: after segments {after} of a backward with {len(self.backward.segments)}; "
                "give them in order, each after one of these"
            )

    @property
    def compute_s(self) -> float:
        """Seconds of compute; no plan is shorter."""
        return self.forward.compute_s + self.backward.compute_s + sum(weight.compute_s for weight in self.weights)

    @property
    def comm_s(self) -> float:
        """Seconds of collectives."""
        return self.forward.comm_s + self.backward.comm_s

    @property
    def sequential_s(self) -> float:
        """Seconds if nothing overlaps."""
        return self.compute_s + self.comm_s

    def available(self, done: int) -> int:
        """Return how many weight gradients can run once ``done`` segments of the backward have run."""
        return sum(weight.after < done for weight in self.weights)

    def then(self, other: StrandPair) -> StrandPair:
        """Return the pair of these layers followed by other layers.

        The forward runs these layers first, the backward the others first.
        """
        backward = other.backward.then(self.backward)
        shift = len(backward.segments) - len(self.backward.segments)
        weights = (replace(weight, after=weight.after + shift) for weight in self.weights)
        return StrandPair(self.forward.then(other.forward), backward, (*other.weights, *weights))

    def repeated(self, times: int) -> StrandPair:
        """Return the pair over ``times`` layers like this one, at least one."""
        whole = self
        for again in repeat(self, times - 1):
            whole = whole.then(again)
        return whole


@dataclass(frozen=True)
class StageStrands:
    """The parts of a stage in order, each with its number of repetitions.

    Attributes:
        runs: (part, repetitions). A part is a layer, or what precedes or follows the layers, with its forward, backward
            and weight gradients. A strand of a part that ends without a collective is joined to the next part.
    """

    runs: tuple[tuple[StrandPair, int], ...]

    def __post_init__(self) -> None:
        if not self.runs or any(count < 1 for _, count in self.runs):
            raise ValueError(
                f"runs: parts that occur {[count for _, count in self.runs]} times; each occurs once or more"
            )

    @classmethod
    def of(cls, parts: Iterable[StrandPair]) -> StageStrands:
        """Return the stage with these parts in order."""
        runs: list[tuple[StrandPair, int]] = []
        for part in parts:
            if runs and runs[-1][0] == part:
                runs[-1] = part, runs[-1][1] + 1
            else:
                runs.append((part, 1))
        return cls(tuple(runs))

    @property
    def layers(self) -> int:
        """The number of parts."""
        return sum(count for _, count in self.runs)

    @cached_property
    def whole(self) -> StrandPair:
        """All parts, one after the other."""
        return reduce(StrandPair.then, (part.repeated(count) for part, count in self.runs))

    def beside(self, other: StageStrands) -> StrandPair:
        """Return the pair of this stage's forward and the other stage's backward."""
        return StrandPair(self.whole.forward, other.whole.backward, other.whole.weights)

    def then(self, other: StageStrands) -> StageStrands:
        """Return this stage followed by ``other`` as one stage."""
        return StageStrands.of(part for runs in (self.runs, other.runs) for part, count in runs for _ in range(count))

    def without(self, layer: StrandPair, times: int) -> StageStrands:
        """Return the stage with ``times`` fewer repetitions of a layer, removed from its longest run."""
        longest = max((count, number) for number, (part, count) in enumerate(self.runs) if part == layer)[1]
        runs = ((part, count - times * (number == longest)) for number, (part, count) in enumerate(self.runs))
        return StageStrands(tuple(runs))
