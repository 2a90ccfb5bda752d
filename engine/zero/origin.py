"""Origin of NaN and infinity: the ranks whose forwards or gradients had them first, before any sum over replicas.

In each step a rank stores a few scalars on its device. Only if the norm is not finite, ranks read and exchange them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.exchange import gather
from weft.engine.stages.cutting.stage import HEAD_WEIGHT
from weft.engine.zero.bucket import Bucket

Extremes = Sequence[tuple[int, Tensor]]
"""Smallest and largest elements of tensors, each a scalar with the virtual stage that made the tensor."""


class Source(NamedTuple):
    """Where NaN or infinity first appeared.

    Attributes:
        ranks: the ranks that produced it, or empty if the cause is the data or divergence.
        forward: virtual stage in whose forward it appeared, `HEAD_WEIGHT`, `HEAD`, or -1 for a backward.
    """

    ranks: tuple[int, ...] = ()
    forward: int = -1


@dataclass(frozen=True)
class Sighting:
    """The stages of one rank with non-finite numbers in one step.

    Attributes:
        pipeline: global rank of the first rank of the pipeline.
        stage: the last stage of the rank whose gradients are not finite, or -1 if all are finite.
        in_loss: whether the rank's part of the loss is not finite.
        forward: the first stage of the rank whose hidden states are not finite, `HEAD_WEIGHT` or `HEAD` if only the
            head's weight or the logits are not, or -1 if all are finite.
    """

    pipeline: int
    stage: int
    in_loss: bool
    forward: int = -1


@dataclass(frozen=True)
class OwnNumbers:
    """This rank's scalars of a step, from which its `Sighting` is derived.

    Attributes:
        extremes: extreme elements of gradients before their reduction, each with the first stage of its bucket.
        loss: this rank's part of the loss, or None if it computes none.
        pipeline: group of this rank's pipeline. None means this rank alone.
        hidden: extreme elements of the hidden states that its stages have computed, of the head's weight and of the
            logits, each with its stage.
    """

    extremes: Extremes
    loss: Tensor | None
    pipeline: dist.ProcessGroup | None
    hidden: Extremes = ()

    @classmethod
    def of_step(
        cls,
        buckets: Iterable[Bucket],
        loss: Tensor | None,
        pipeline: dist.ProcessGroup | None,
        hidden: Extremes = (),
    ) -> OwnNumbers:
        """Collect the scalars of the step that has just been reduced."""
        return cls([(min(b.stages), value) for b in buckets for value in b.extremes], loss, pipeline, hidden)

    def origin(self) -> Source:
        """Gather the `Sighting` of every rank, and return the source by `origins`. Collective call."""
        if not dist.is_initialized():
            return Source()
        ranks = [dist.get_rank()] if self.pipeline is None else dist.get_process_group_ranks(self.pipeline)
        return origins(gather(self._sighting(min(ranks)), kinds=(Sighting,)))

    def _sighting(self, pipeline: int) -> Sighting:
        in_loss = self.loss is not None and not torch.isfinite(self.loss).item()
        return Sighting(pipeline, max(_bad(self.extremes), default=-1), in_loss, min(_bad(self.hidden), default=-1))


def _bad(extremes: Extremes) -> list[int]:
    """Return the stages whose extremes are not finite."""
    return [stage for stage, value in extremes if not torch.isfinite(value).item()]


def origins(sightings: Sequence[Sighting]) -> Source:
    """Return the ranks that produced NaN or infinity, or a source without ranks if the cause is the data or divergence.

    A forward propagates NaN from the first stage to the last. So the origin in a pipeline is the first stage whose
    hidden states have NaN, because its inputs are finite. After the hidden states come the head's weight and the
    logits. If all are finite, a loss that is not finite comes from the labels or the objective. If the loss is finite,
    too, the origin is the last stage whose gradients have NaN, because a backward propagates NaN to earlier stages. If
    there are several pipelines and all have NaN, the cause is not a single rank, unless it is the head's weight.

    Args:
        sightings: one for each rank, in rank order.
    """
    pipelines: dict[int, list[int]] = defaultdict(list)
    for rank, sighting in enumerate(sightings):
        pipelines[sighting.pipeline].append(rank)
    found = [_first(sightings, ranks) for ranks in pipelines.values()]
    if weights := [rank for each in found if each.forward == HEAD_WEIGHT for rank in each.ranks]:
        return Source(tuple(sorted(weights)), HEAD_WEIGHT)
    if len(sightings) == 1 or (len(found) > 1 and all(each.ranks for each in found)):
        return Source()
    found = [each for each in found if each.ranks]
    forwards = {each.forward for each in found}
    return Source(
        tuple(sorted(rank for each in found for rank in each.ranks)), forwards.pop() if len(forwards) == 1 else -1
    )


def _first(sightings: Sequence[Sighting], ranks: Sequence[int]) -> Source:
    """Return the first origin in one pipeline, by the rules of `origins`."""
    forward = min((each for rank in ranks if (each := sightings[rank].forward) >= 0), default=-1)
    if forward >= 0:
        return Source(tuple(rank for rank in ranks if sightings[rank].forward == forward), forward)
    last = max(sightings[rank].stage for rank in ranks)
    if last < 0 or any(sightings[rank].in_loss for rank in ranks):
        return Source()
    return Source(tuple(rank for rank in ranks if sightings[rank].stage == last))
