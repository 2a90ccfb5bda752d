"""Durations of strand pairs: a segment plan for the forward of any stage with the backward of any other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from weft.conf.host.measurements import spread_of
from weft.pipeline.action import Op, Slot, is_pair
from weft.pipeline.costs import StageCost
from weft.pipeline.schedule import Schedule
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.plan import SegmentPlan, Step, steps_of
from weft.pipeline.strands.search import search_stages
from weft.pipeline.strands.segments import StageStrands, StrandPair
from weft.pipeline.timeline import Timeline


@dataclass(frozen=True)
class StrandCosts:
    """The segments of virtual stages, and how well operators overlap.

    Ranks with equal costs derive equal plans.

    Attributes:
        stages: segments of each virtual stage.
        handover_s: seconds of a switch from one strand to the other.
    """

    stages: tuple[StageStrands, ...]
    overlap: OverlapTable = field(default_factory=OverlapTable)
    handover_s: float = 0.0

    def plan(self, forward: int, backward: int, *, weights: bool = True) -> SegmentPlan:
        """Return the order of segments for the forward of one stage and the backward of another."""
        return self._searched(forward, backward, weights).plan

    def scale(self, forward: int, backward: int, *, weights: bool = True) -> float:
        """Return the duration of the planned pair divided by the time of its halves one after the other."""
        return self._searched(forward, backward, weights).scale

    def scale_under(self, overlap: OverlapTable, forward: int, backward: int, weights: bool) -> float:
        """Return `scale` for the same plan if operators overlap as in ``overlap``."""
        pair = _with_weights(self.stages[forward], weights).beside(_with_weights(self.stages[backward], weights))
        plan = self.plan(forward, backward, weights=weights)
        return plan.seconds(pair, overlap, self.handover_s) / pair.sequential_s if pair.sequential_s else 1.0

    def held(self, forward: int, backward: int, saved_bytes: float, freed_bytes: float) -> float:
        """Return the peak memory of a pair with a full backward, in bytes beyond what was allocated before the pair.

        While the forward saves its layers' activations one by one, the backward frees its own
        (DHelix section 4.1). So the peak depends on how far the plan lets the forward run ahead.
        """
        progress = self._searched(forward, backward, True).progress
        return max(saved * saved_bytes - freed * freed_bytes for saved, freed in progress)

    def timed(self, stages: Sequence[StageCost]) -> tuple[StageCost, ...]:
        """Return the stages' costs with the seconds of the strands, which include collectives inside of layers."""
        return tuple(
            replace(
                stage,
                forward_s=strands.whole.forward.compute_s + strands.whole.forward.comm_s,
                input_s=strands.whole.backward.compute_s + strands.whole.backward.comm_s,
                weight_s=sum(weight.compute_s for weight in strands.whole.weights),
            )
            for stage, strands in zip(stages, self.stages, strict=True)
        )

    def for_cell(self, pipelines: int) -> StrandCosts:
        """Return the costs of a DP-cell of ``pipelines`` pipelines."""
        return replace(self, stages=self.stages * pipelines)

    def joined(self, bounds: list[int]) -> StrandCosts:
        """Return the costs after stages ``bounds[i]`` to ``bounds[i + 1]`` are joined to one stage."""
        parts = (self.stages[start:stop] for start, stop in pairwise(bounds))
        return replace(self, stages=tuple(reduce(StageStrands.then, part) for part in parts))

    def divided(self, parts: int) -> StrandCosts:
        """Return the costs with each stage divided into ``parts`` stages of equal layers.

        Raises:
            ValueError: the layers of a stage do not divide.
        """
        if bad := [count for stage in self.stages for _, count in stage.runs if count % parts]:
            raise ValueError(
                f"strands of stages of {bad[0]} layers cannot be divided into {parts} parts; give them for that many"
            )
        stages = (StageStrands(tuple((layer, count // parts) for layer, count in s.runs)) for s in self.stages)
        return replace(self, stages=tuple(stage for stage in stages for _ in range(parts)))

    def _searched(self, forward: int, backward: int, weights: bool) -> _Found:
        key = self._kinds[forward], self._kinds[backward], weights
        if key not in self._known:
            self._known[key] = _searched(
                self.stages[forward], self.stages[backward], self.overlap, self.handover_s, weights
            )
        return self._known[key]

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """The first equal stage of each stage."""
        firsts: dict[StageStrands, int] = {}
        return tuple(firsts.setdefault(stage, number) for number, stage in enumerate(self.stages))

    @cached_property
    def _known(self) -> dict[tuple[int, int, bool], _Found]:
        return {}


class _Found(NamedTuple):
    """A plan with its duration and memory profile.

    Attributes:
        scale: duration of the pair relative to the sum of its halves.
        progress: at each start of a forward segment, the share of the forward that has begun and the share of the
            backward that has ended, with its weight gradients.
    """

    plan: SegmentPlan
    scale: float
    progress: tuple[tuple[float, float], ...]


@lru_cache(maxsize=1024)
def _searched(
    forward: StageStrands, backward: StageStrands, table: OverlapTable, handover_s: float, weights: bool
) -> _Found:
    """Search for a plan, and return it with its duration and memory profile.

    Results are cached, so that a process that plans again does not search again.
    """
    forward, backward = _with_weights(forward, weights), _with_weights(backward, weights)
    plan, pair = search_stages(forward, backward, table, handover_s), forward.beside(backward)
    seconds = plan.seconds(pair, table, handover_s)
    scale = seconds / pair.sequential_s if pair.sequential_s else 1.0
    return _Found(plan, scale, tuple(_progress(plan, pair)))


def _with_weights(stage: StageStrands, weights: bool) -> StageStrands:
    """Return the stage, without its weight gradients unless ``weights`` is True."""
    return stage if weights else StageStrands(tuple((replace(part, weights=()), count) for part, count in stage.runs))


def _progress(plan: SegmentPlan, pair: StrandPair) -> Iterator[tuple[float, float]]:
    ends = steps_of(pair)
    done = dict.fromkeys(Step, 0)
    yield 0.0, 0.0
    for step in plan.steps:
        if step is Step.forward:
            freed = min((done[kind] / ends[kind] for kind in (Step.backward, Step.weight) if ends[kind]), default=1.0)
            yield (done[step] + 1) / ends[step], freed
        done[step] += 1


Kinds = tuple[tuple[bool, Op, int], ...]
"""The actions of a slot, a forward first, without their micro-batches."""
_HALVINGS = 20


def fit_overlap(timelines: Sequence[Timeline], pairs: StrandCosts) -> tuple[OverlapTable, float] | None:
    """Return the overlap of operators that reproduces measured strand pairs, and their speed relative to predictions.

    All factors are moved by the same share towards 0 or 1. A pair counts if its halves ran alone elsewhere in the
    steps, so that the speed of the device plays no part. None if no pair counts.

    Args:
        pairs: the costs with which the steps were planned.
    """
    seconds: dict[Kinds, list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            kinds = tuple(sorted((action.op is not Op.F, action.op, action.stage) for action in span.slot))
            seconds[kinds].append(span.end_s - span.start_s)
    alone = {kinds[0]: median(values) for kinds, values in seconds.items() if len(kinds) == 1}
    measured = {
        (kinds[0][-1], kinds[1][-1], kinds[1][1] is Op.B): median(values) / (alone[kinds[0]] + alone[kinds[1]])
        for kinds, values in seconds.items()
        if len(kinds) == 2 and alone.keys() >= {*kinds}
    }
    if not measured:
        return None

    def faster(share: float) -> list[float]:
        table = pairs.overlap.moved(share)
        return [pairs.scale_under(table, *pair) / scale for pair, scale in measured.items()]

    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if median(faster(middle)) > 1 else (low, middle)
    ratios = faster(0.0)
    return replace(pairs.overlap.moved(low), spread=spread_of(ratios, median(ratios))), median(ratios)


def pair_name(pair: Slot) -> str:
    """Return the name of the plan of a pair, such as ``0F+3B``; all pairs of these stages and operations share it."""
    return "+".join(f"{action.stage}{action.op.value}" for action in pair)


def plans_for(schedules: Iterable[Schedule], costs: StrandCosts | None, num_stages: int) -> dict[str, SegmentPlan]:
    """Return the segment plans of all pairs in a run's schedules, by `pair_name`.

    Args:
        schedules: schedules of DP-cells, whose pipelines are alike.
        costs: costs of one pipeline. None means that the segments of layers are unknown; then nothing is planned.
        num_stages: virtual stages of a pipeline.
    """
    if costs is None:
        return {}
    plans: dict[str, SegmentPlan] = {}
    for slot in {slot for schedule in schedules for row in schedule.rows for slot in row if is_pair(slot)}:
        one, other = (action._replace(stage=action.stage % num_stages) for action in slot)
        name = pair_name((one, other))
        if name not in plans:
            plans[name] = costs.plan(one.stage, other.stage, weights=other.op is Op.B)
    return plans
