"""The cost model of primitives: alpha-beta, per class of link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weft.comm.collectives.collective import EXECUTED, Primitive
from weft.comm.collectives.group import LinkClass
from weft.comm.collectives.rewrite import Rewrite


@dataclass(frozen=True)
class AlphaBeta:
    """A message of n bytes takes ``alpha_s + n * beta_s`` seconds.

    Attributes:
        alpha_s: latency of an empty message.
        beta_s: seconds per byte while all sub-groups of an axis communicate.
    """

    alpha_s: float
    beta_s: float


@dataclass(frozen=True)
class Sample:
    """Seconds of a primitive along an axis of ``size`` ranks with a workload of ``num_bytes``."""

    link: LinkClass
    primitive: Primitive
    size: int
    num_bytes: int
    seconds: float


def rounds(primitive: Primitive, size: int) -> int:
    """Return the sequential messages per rank in a group of ``size``: a ring's, or one to each other rank."""
    if primitive is Primitive.shift:
        return 1
    return (size - 1) * (2 if primitive is Primitive.all_reduce else 1)


def moved_share(primitive: Primitive, size: int) -> float:
    """Return the bytes that a rank sends, as a share of the workload (the lower bound)."""
    if primitive is Primitive.shift:
        return 1.0
    return rounds(primitive, size) / size


@dataclass(frozen=True)
class CollectiveCosts:
    """Costs by class of link and primitive.

    Costs are per primitive because libraries implement them differently: gloo, for example, runs a
    reduce-scatter as an all-reduce.
    """

    table: Mapping[tuple[LinkClass, Primitive], AlphaBeta]
    spread: float | None = field(default=None, compare=False)
    """Median relative difference of the measurements from these costs, or None without measurements."""

    @classmethod
    def of_links(cls, links: Mapping[LinkClass, AlphaBeta]) -> CollectiveCosts:
        """Return the costs of ideal primitives over links of known cost. ``mixed`` defaults to ``inter``."""
        known = {LinkClass.mixed: links[LinkClass.inter], **links} if LinkClass.inter in links else dict(links)
        return cls({(link, primitive): cost for link, cost in known.items() for primitive in EXECUTED})

    def step_s(self, primitive: Primitive, link: LinkClass, size: int, num_bytes: float) -> float:
        """Return the seconds of a primitive along an axis of ``size`` ranks with a workload of ``num_bytes``.

        An all-to-all's workload is each rank's whole input, including the part that stays. A shift is one message,
        priced with the measured alpha and beta of all-to-alls.

        Raises:
            ValueError: links of that class were not measured.
        """
        if size == 1 or not num_bytes:
            return 0.0
        measured = Primitive.all_to_all if primitive is Primitive.shift else primitive
        if (link, measured) not in self.table:
            raise ValueError(
                f"{measured.value} over {link.value} links: not measured; run `python -m benchmarks collectives`"
            )
        cost = self.table[link, measured]
        return rounds(primitive, size) * cost.alpha_s + moved_share(primitive, size) * num_bytes * cost.beta_s

    def sample_s(self, sample: Sample) -> float:
        """Return the predicted seconds of a sample's primitive and workload."""
        return self.step_s(sample.primitive, sample.link, sample.size, sample.num_bytes)

    def steps_s(self, rewrite: Rewrite) -> tuple[float, ...]:
        """Return the seconds of each step, with the workload as one chunk."""
        return tuple(
            self.step_s(step.primitive, rewrite.mesh.links[step.axis], rewrite.mesh.shape[step.axis], num_bytes)
            for step, num_bytes in zip(rewrite.steps, rewrite.step_bytes(), strict=True)
        )

    def rewrite_s(self, rewrite: Rewrite) -> float:
        """Return the seconds of the pipeline of chunks through steps. Each axis runs one chunk at a time."""
        ready = [0.0] * len(rewrite.granularity)
        free: dict[int, float] = {}
        for step, num_bytes in zip(rewrite.steps, rewrite.step_bytes(), strict=True):
            link, size = rewrite.mesh.links[step.axis], rewrite.mesh.shape[step.axis]
            for chunk, share in enumerate(rewrite.granularity):
                start = max(ready[chunk], free.get(step.axis, 0.0))
                ready[chunk] = start + self.step_s(step.primitive, link, size, share * num_bytes)
                free[step.axis] = ready[chunk]
        return max(ready)


def fit(samples: Iterable[tuple[float, float, float]]) -> AlphaBeta:
    """Fit alpha and beta by non-negative least squares of relative errors.

    Args:
        samples: (sequential messages, bytes sent per rank, measured seconds).

    Raises:
        ValueError: fewer than two samples.
    """
    rows = [(first / seconds, second / seconds) for first, second, seconds in samples]
    if len(rows) < 2:
        raise ValueError("a fit needs at least two measurements")
    aa, bb, ab = (sum(x * y for x, y in pairs) for pairs in _products(rows))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return AlphaBeta(alpha, beta)
    return max((AlphaBeta(a / aa, 0.0), AlphaBeta(0.0, b / bb)), key=lambda line: _explained(line, a, b))


def _products(rows: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return ([(x, x) for x, _ in rows], [(y, y) for _, y in rows], rows)


def _explained(line: AlphaBeta, a: float, b: float) -> float:
    """Return by how much a one-parameter fit reduces the sum of squares."""
    return line.alpha_s * a + line.beta_s * b
