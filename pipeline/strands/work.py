"""The work of segments before a machine's speed is known: operations, bytes, collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from weft.pipeline.strands.segments import Kind, LinkScope, Segment, StageStrands, Strand, StrandPair, WeightGradient


@dataclass(frozen=True)
class Speed:
    """The speed of a rank's device.

    Attributes:
        flops_per_s: speed of matrix products.
        bytes_per_s: bandwidth of its memory, reads and writes together.
    """

    flops_per_s: float
    bytes_per_s: float = float("inf")


@dataclass(frozen=True)
class Work:
    """The compute of a segment.

    Attributes:
        product_flops, attention_flops: operations of matrix products, and of attention's scores.
        moved_bytes: bytes that all other operations read and write.
    """

    product_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.product_flops + other.product_flops,
            self.attention_flops + other.attention_flops,
            self.moved_bytes + other.moved_bytes,
        )

    def by_kind(self, speed: Speed) -> dict[Kind, float]:
        """Return the seconds of each kind of compute."""
        return {
            Kind.gemm: self.product_flops / speed.flops_per_s,
            Kind.attention: self.attention_flops / speed.flops_per_s,
            Kind.memory: self.moved_bytes / speed.bytes_per_s,
        }


@dataclass(frozen=True)
class Traffic:
    """A collective among the ranks of an axis.

    Attributes:
        axis: tensor, context or expert.
        primitive: name of the collective, such as all_gather.
        num_bytes: bytes of the tensor; for gathers and scatters, of all members' parts together.
    """

    axis: str
    primitive: str
    num_bytes: float


@dataclass(frozen=True)
class SegmentWork:
    """The compute of a segment and the collective that ends it."""

    work: Work
    traffic: Traffic | None = None


@dataclass(frozen=True)
class PartWork:
    """A part of a model: a decoder layer, or what comes before or after all layers.

    Attributes:
        forward, backward: segments; the last one is joined to the following part.
        weights: each weight gradient that can be deferred: the index of the backward segment that it follows, and
            its work.
    """

    forward: tuple[SegmentWork, ...]
    backward: tuple[SegmentWork, ...]
    weights: tuple[tuple[int, Work], ...] = ()

    def timed(
        self, speed: Speed, traffic_s: Callable[[Traffic], float], links: Callable[[str], LinkScope]
    ) -> StrandPair:
        """Return the part with seconds in place of work.

        Args:
            traffic_s: returns the seconds of a collective alone.
            links: returns the link class of an axis.
        """

        def segment(given: SegmentWork) -> Segment:
            seconds = given.work.by_kind(speed)
            kind, compute_s = max(seconds, key=lambda kind: seconds[kind]), sum(seconds.values())
            if given.traffic is None:
                return Segment(compute_s, kind=kind)
            link, comm_s = links(given.traffic.axis), traffic_s(given.traffic)
            return Segment(compute_s, link, comm_s, kind)

        def weight(after: int, work: Work) -> WeightGradient:
            return WeightGradient(after, sum(work.by_kind(speed).values()))

        forward, backward = (Strand(tuple(map(segment, strand))) for strand in (self.forward, self.backward))
        return StrandPair(forward, backward, tuple(weight(*given) for given in self.weights))


@dataclass(frozen=True)
class StrandWork:
    """A whole model, part by part, on one of the ranks that share its layers.

    Attributes:
        before, after: work before and after the layers.
        layers: the distinct kinds of layers.
        order: for each layer, the index of its kind.
    """

    before: PartWork
    layers: tuple[PartWork, ...]
    order: tuple[int, ...]
    after: PartWork

    @classmethod
    def of(cls, before: PartWork, layers: Iterable[PartWork], after: PartWork) -> StrandWork:
        """Return the work of a model from that of its parts."""
        kinds: dict[PartWork, int] = {}
        order = tuple(kinds.setdefault(layer, len(kinds)) for layer in layers)
        return cls(before, tuple(kinds), order, after)

    def timed(
        self, speed: Speed, traffic_s: Callable[[Traffic], float], links: Callable[[str], LinkScope]
    ) -> Callable[[Collection[int], bool, bool], StageStrands]:
        """Return a function that makes the segments of a virtual stage in seconds. See `PartWork.timed`.

        Its arguments are layer numbers, and whether the stage is the first and the last of the model.
        """
        before, after = (part.timed(speed, traffic_s, links) for part in (self.before, self.after))
        kinds = [layer.timed(speed, traffic_s, links) for layer in self.layers]

        def stage(layers: Collection[int], first: bool, last: bool) -> StageStrands:
            inner = (kinds[self.order[number]] for number in layers)
            return StageStrands.of((*((before,) if first else ()), *inner, *((after,) if last else ())))

        return stage
