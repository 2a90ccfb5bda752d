"""The space of a request: degrees of parallelism, families in the order of their bounds, shapes and placements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.shapes import Degrees, Group, all_degrees, arranged, groups, members
from weft.pipeline.workload import ModelWork

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

USUAL_SIZE = 8
"""Sequences of a micro-batch, at most, where good plans are looked for first."""


class Family(NamedTuple):
    """Shapes that differ in stages, ZeRO and placement.

    Attributes:
        bound: lower bound of their scores.
        shape: one shape of the family.
        counts: numbers of stages that have not been expanded.
        bounds: lower bounds of the scores with at most each of these numbers of stages; empty if there is one number.
    """

    bound: float
    shape: Shape
    counts: tuple[int, ...]
    bounds: tuple[float, ...]


class _Part(NamedTuple):
    """Families of a group that fit into one site, or that cross at least one link, as arrays."""

    family: Shape
    crosses: bool
    replicas: Array
    microbatches: Array
    routes: Array
    low: Array
    high: Array
    bounds: Array


class Space:
    """The space of a request; bounds of families are computed once.

    Args:
        is_narrow: True to leave out values that are rarely best, to find good plans soon.
        evaluation: the request's evaluation, if another space has one, which keeps the bounds that both compute.
    """

    def __init__(
        self,
        cluster: Cluster,
        work: ModelWork,
        request: Request,
        *,
        is_narrow: bool = False,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.cluster, self.work, self.request, self.is_narrow = cluster, work, request, is_narrow
        self.evaluation = evaluation or Evaluation(cluster, work, request)
        self.shapes = 0
        every = list(all_degrees(cluster, work, request))
        if is_narrow:
            least = min((one.context for one in every), default=1)
            every = [one for one in every if one.context == least]
        self.degrees = [(self.evaluation.degrees_bound(one), one) for one in every]
        self._groups: dict[Degrees, list[Group]] = {}
        self._parts: dict[tuple[Degrees, bool], list[_Part]] = {}

    def families(self, degrees: Degrees, routes: range, *, alone: bool) -> Iterator[Family]:
        """Yield the families of these degrees with these numbers of routes, the least bound first.

        Args:
            alone: True for only the families that fit into one site.
        """
        import numpy as np  # takes longer to load than other commands of the pipeline take

        found, bounds = [], []
        for part in self._parts_of(degrees, alone=alone):
            is_wanted = (part.routes >= routes.start) & (part.routes < routes.stop)
            bounds.append(part.bounds[is_wanted])
            found += [(part, at) for at in np.nonzero(is_wanted)[0].tolist()]
        ordered = np.concatenate(bounds) if bounds else np.zeros(0)
        for number in np.argsort(ordered, kind="stable").tolist():
            if ordered[number] == np.inf:  # and so are all that follow
                self.evaluation.refused.links()
                break
            part, at = found[number]
            counts = np.arange(part.low[at], part.high[at] + 1)
            if self.is_narrow and len(counts) > 1:
                layers = len(self.work.layers)
                counts = counts[-(-layers // -(-layers // counts)) == counts]
            if len(counts) and (family := self._opened(part, at, counts, float(ordered[number]))) is not None:
                yield family

    def _opened(self, part: _Part, at: int, counts: Array, bound: float) -> Family | None:
        """Return a family with the numbers of stages with which it may fit memory, or None if there are none."""
        import numpy as np

        one = slice(at, at + 1)
        replicas, microbatches, routes = part.replicas[one], part.microbatches[one], part.routes[one]
        shape = part.family.changed(replicas=int(replicas[0]), microbatches=int(microbatches[0]), routes=int(routes[0]))
        least = self.evaluation.least_stages(list(members(self.request, shape, int(counts[-1]))))
        if not least:
            return None
        counts = counts[counts >= least]
        if len(counts) == 1:
            return Family(bound, shape, tuple(counts.tolist()), ())
        fields = np.zeros(1, dtype=int), replicas, microbatches, routes, counts
        by_count = self.evaluation.families.of([part.family], *fields, crosses=part.crosses)
        return Family(bound, shape, tuple(counts.tolist()), tuple(by_count.tolist()))

    def _parts_of(self, degrees: Degrees, *, alone: bool) -> Iterator[_Part]:
        """Yield the families of these degrees in parts, which are computed once."""
        if degrees not in self._groups:
            self._groups[degrees] = [
                group
                for group in groups(self.cluster, self.work, self.request, degrees)
                if not self.is_narrow or group.family.microbatch_size <= USUAL_SIZE
            ]
            self.shapes += sum(map(self._count, self._groups[degrees]))
        for crosses in (False,) if alone else (False, True):
            if (degrees, crosses) not in self._parts:
                parts = [self._part(group, crosses=crosses) for group in self._groups[degrees]]
                self._parts[degrees, crosses] = self._bounded([part for part in parts if len(part.low)])
            yield from self._parts[degrees, crosses]

    def _bounded(self, parts: list[_Part]) -> list[_Part]:
        """Return parts of the same degrees with their bounds, which are computed together."""
        import numpy as np

        if not parts:
            return []
        sizes = [len(part.low) for part in parts]
        columns = [[getattr(part, name) for part in parts] for name in ("replicas", "microbatches", "routes", "high")]
        fields = np.repeat(np.arange(len(parts)), sizes), *map(np.concatenate, columns)
        bounds = self.evaluation.families.of([part.family for part in parts], *fields, crosses=parts[0].crosses)
        ends = np.split(bounds, np.cumsum(sizes)[:-1])
        return [part._replace(bounds=each) for part, each in zip(parts, ends, strict=True)]

    def _part(self, group: Group, *, crosses: bool) -> _Part:
        """Return the families of a group within one site, or across sites, without their bounds."""
        import numpy as np

        low, high = (group.most_alone + 1, group.most) if crosses else (np.ones_like(group.most), group.most_alone)
        if (pinned := self.request.pins.get("num_stages")) is not None:
            is_pinned = (low <= pinned) & (pinned <= high)
            low, high = np.where(is_pinned, pinned, 1), np.where(is_pinned, pinned, 0)
        at = np.nonzero(low <= high)[0]
        fields = group.replicas[at], group.microbatches[at], group.routes[at]
        return _Part(group.family, crosses, *fields, low[at], high[at], np.zeros(0))

    def _count(self, group: Group) -> int:
        """Return the number of shapes of a group; folds within sites and over them count as one."""
        import numpy as np

        pins, is_shared = self.request.pins, group.replicas * group.family.context > 1
        folded = (group.most.clip(max=len(self.work.layers) // 2) - 1).clip(min=0)
        each = group.most + 3 * folded if "num_stages" not in pins else group.most.clip(max=1)
        zero_stages = np.where(is_shared, 2 + (group.microbatches == 1) - (group.routes > 1), 1)
        return int((each * (1 if "zero_stage" in pins else zero_stages)).sum())

    def members(self, family: Shape, stages: int) -> Iterator[tuple[float, Shape]]:
        """Yield the shapes of a family with this number of stages, and their bounds, if they fit anywhere."""
        for shape in members(self.request, family, stages):
            if (bound := self.evaluation.shape_bound(shape)) is not None:
                yield bound, shape

    def arranged(self, shape: Shape, route: Route, bound: float) -> Iterator[tuple[float, Shape]]:
        """Yield a shape on a whole route with each placement, and the placement's bound.

        In a single site both folds are the same, so only one is included.
        """
        pinned = "arrangement" in self.request.pins
        for one in arranged(self.work, self.request, shape):
            if one.crossings == 1 or pinned:
                yield bound, one
            elif len(route.sites) > shape.routes and (least := self.evaluation.route_bound(one, route)) is not None:
                yield max(bound, least), one
