"""Durations of a run's strand pairs: traced segments, converted to seconds by facts about devices and links."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from weft.comm.collectives import Primitive
from weft.comm.collectives.group import LinkClass
from weft.conf.schema import WeftConfig
from weft.engine.planning.facts import AxisFacts, Facts
from weft.engine.precision import DTYPES
from weft.engine.stages.cutting.split import StageSplit
from weft.engine.strands.overlap_cache import overlap_cache, overlap_key
from weft.engine.strands.tracing import trace_strands
from weft.pipeline.costs import StageCost
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.segments import LinkScope, StageStrands
from weft.pipeline.strands.work import Speed, StrandWork, Traffic

HANDOVER_S = 5e-5
"""Seconds for which a switch between strands occupies a rank."""
LEAST_COMPUTE = 0.05
"""Share of a measured stage that is taken to be compute where collectives alone seem to take longer."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StrandFacts:
    """A rank's work inside layers, and the speeds at which it is done, before the first step.

    Attributes:
        work: computations between collectives, and the collectives' traffic.
        speed: speed of a rank.
        operators: measured overlap of compute and collectives, or None without measurements.
    """

    work: StrandWork
    speed: Speed
    operators: OverlapTable | None

    def pairs(self, axes: Mapping[str, AxisFacts], split: StageSplit, measured: Sequence[StageCost]) -> StrandCosts:
        """See `LayerStrands`."""
        speed = self._fitted(axes, split, measured) if measured else self.speed
        return StrandCosts(self._stages(axes, split, speed), self.operators or OverlapTable(), HANDOVER_S)

    def _stages(self, axes: Mapping[str, AxisFacts], split: StageSplit, speed: Speed) -> tuple[StageStrands, ...]:
        def link(axis: str) -> LinkScope:
            inside = axes[axis].group.flat.links[0] is LinkClass.intra
            return LinkScope.inside_host if inside else LinkScope.between_hosts

        stage = self.work.timed(speed, lambda traffic: _traffic_s(axes, traffic), link)
        last = split.num_stages - 1
        return tuple(stage(layers, index == 0, index == last) for index, layers in enumerate(split.layers))

    def _fitted(self, axes: Mapping[str, AxisFacts], split: StageSplit, measured: Sequence[StageCost]) -> Speed:
        """Return the speed at which all strands together take the measured time of their stages."""
        wholes = [stage.whole for stage in self._stages(axes, split, self.speed)]
        compute_s, comm_s = sum(whole.compute_s for whole in wholes), sum(whole.comm_s for whole in wholes)
        measured_s = sum(stage.compute_s for stage in measured)
        slower = max(measured_s - comm_s, LEAST_COMPUTE * measured_s) / compute_s
        return Speed(self.speed.flops_per_s / slower, self.speed.bytes_per_s / slower)


KINDS = (StrandFacts, StrandCosts)
"""Types in a run's facts and plan, for their exchange between ranks."""


def with_strands(
    config: WeftConfig,
    trained: PreTrainedConfig | nn.Module,
    facts: Facts,
    device: torch.device,
    speed: Callable[[], tuple[float, float]],
    *,
    own_loss: bool,
) -> Facts:
    """Add the computations and collectives inside layers to the facts, because strand pairs are planned with them.

    Args:
        trained: the whole model, or the config of one that will be made.
        speed: returns a rank's operations per second and bytes of memory traffic per second, measured on demand.
        own_loss: whether the model's own loss is minimised.
    """
    if not facts.axes or any(axis.costs is None for axis in facts.axes.values()):
        return facts
    try:
        work = _traced(config, trained, facts, own_loss=own_loss)
        for part in (work.before, *work.layers, work.after):
            for segment in (*part.forward, *part.backward):
                if segment.traffic is not None:
                    _traffic_s(facts.axes, segment.traffic)
    except ValueError as error:
        log.warning("strand pairs are not planned: %s", error)
        return facts
    cache, key = overlap_cache(config.data.cache_dir), overlap_key(device)
    source = f"traced without data; speed as flops_per_s, and of memory; overlap of {key}, cache {cache.path}"
    return facts.with_strands(StrandFacts(work, Speed(*speed()), cache.read(key)), source)


def _traffic_s(axes: Mapping[str, AxisFacts], traffic: Traffic) -> float:
    """Return the seconds of a collective that overlaps with nothing.

    Raises:
        ValueError: the collective was not measured.
    """
    return axes[traffic.axis].seconds(Primitive(traffic.primitive), traffic.num_bytes)


def _traced(config: WeftConfig, trained: PreTrainedConfig | nn.Module, facts: Facts, *, own_loss: bool) -> StrandWork:
    return trace_strands(
        trained,
        {axis: known.group.size for axis, known in facts.axes.items()},
        exchange=facts.exchange,
        microbatch_size=config.train.microbatch_size,
        sequence_length=config.data.sequence_length,
        checkpointing=facts.recomputes,
        lora=config.model.lora,
        dtype=DTYPES[config.train.precision],
        own_loss=own_loss,
        loss_chunk_bytes=config.model.loss_chunk_mb * 1e6 if facts.model.chunks_loss else 0.0,
    )
