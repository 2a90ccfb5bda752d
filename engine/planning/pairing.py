"""Durations of a run's strand pairs: traced segments in seconds, by facts about devices and links."""

from __future__ import annotations

from dataclasses import replace

from weft.comm.collectives import Primitive
from weft.comm.collectives.group import LinkClass
from weft.engine.planning.facts import Facts
from weft.engine.stages.split import StageSplit
from weft.pipeline.costs import StageCost
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import PairCosts
from weft.pipeline.strands.segments import LinkScope
from weft.pipeline.strands.stages import StageStrands
from weft.pipeline.strands.work import Speed, Traffic

HANDOVER_S = 5e-5
"""Seconds for which a switch between strands occupies a rank."""
LEAST_COMPUTE = 0.05
"""Share of a measured stage that is taken to be compute where collectives alone seem to take longer."""


def stage_pairs(facts: Facts, split: StageSplit, measured: tuple[StageCost, ...]) -> PairCosts | None:
    """Return the durations of pairs of virtual stages, or None where they are not known.

    Args:
        measured: costs of the stages. If empty, the speed of a rank is used.
    """
    if (given := facts.stage_pairs.get(split.num_stages)) is not None:
        return given
    if facts.strands is None or facts.speed is None:
        return None
    speed = _fitted(facts, split, measured) if measured else facts.speed
    return PairCosts(_stages(facts, split, speed), facts.operators or OverlapTable(), HANDOVER_S)


def with_strands(stages: tuple[StageCost, ...], pairs: PairCosts) -> tuple[StageCost, ...]:
    """Estimated costs with the seconds of traced strands, in which collectives and shares of matrices are."""
    return tuple(
        replace(
            stage,
            forward_s=strands.whole.forward.compute_s + strands.whole.forward.comm_s,
            input_s=strands.whole.backward.compute_s + strands.whole.backward.comm_s,
            weight_s=sum(weight.compute_s for weight in strands.whole.weights),
        )
        for stage, strands in zip(stages, pairs.stages, strict=True)
    )


def traffic_s(facts: Facts, traffic: Traffic) -> float:
    """Seconds of a collective alone.

    Raises:
        ValueError: it was not measured.
    """
    axis = facts.axes[traffic.axis]
    assert axis.costs is not None
    return axis.costs.step_s(Primitive(traffic.primitive), axis.group.flat.links[0], axis.group.size, traffic.num_bytes)


def _stages(facts: Facts, split: StageSplit, speed: Speed) -> tuple[StageStrands, ...]:
    assert facts.strands is not None

    def link(axis: str) -> LinkScope:
        inside = facts.axes[axis].group.flat.links[0] is LinkClass.intra
        return LinkScope.inside_host if inside else LinkScope.between_hosts

    stage = facts.strands.timed(speed, lambda traffic: traffic_s(facts, traffic), link)
    last = split.num_stages - 1
    return tuple(stage(layers, index == 0, index == last) for index, layers in enumerate(split.layers))


def _fitted(facts: Facts, split: StageSplit, measured: tuple[StageCost, ...]) -> Speed:
    """The speed at which strands take as long as their stages were measured to, all in all."""
    assert facts.speed is not None
    wholes = [stage.whole for stage in _stages(facts, split, facts.speed)]
    compute_s, comm_s = sum(whole.compute_s for whole in wholes), sum(whole.comm_s for whole in wholes)
    measured_s = sum(stage.forward_s + stage.input_s + stage.weight_s for stage in measured)
    slower = max(measured_s - comm_s, LEAST_COMPUTE * measured_s) / compute_s
    return Speed(facts.speed.flops_per_s / slower, facts.speed.bytes_per_s / slower)
