"""Origin of NaN and infinity: the ranks whose own forwards or gradients had them first, before any sum over replicas.

Nothing is exchanged in a step whose norm is finite. Each rank keeps a few scalars on its device, and reads them
once all ranks have seen a norm that is not finite.
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
from weft.engine.zero.bucket import Bucket

Extremes = Sequence[tuple[int, Tensor]]
"""Smallest and largest elements of tensors, each a scalar with the virtual stage that made the tensor."""


class Source(NamedTuple):
    """Where NaN or infinity first appeared.

    Attributes:
        ranks: those that made it, or empty if the data or the training did.
        forward: virtual stage in whose forward it appeared, or -1 if that was in a backward.
    """

    ranks: tuple[int, ...] = ()
    forward: int = -1


@dataclass(frozen=True)
class Sighting:
    """The numbers of one rank in one step that are not finite.

    Attributes:
        pipeline: first rank of its pipeline.
        stage: the last of its stages whose own gradients are not finite, or -1 if all are finite.
        in_loss: whether its part of the loss is not finite.
        forward: the first of its stages whose hidden states are not finite, or -1 if all are finite.
    """

    pipeline: int
    stage: int
    in_loss: bool
    forward: int = -1


@dataclass(frozen=True)
class OwnNumbers:
    """Scalars of this rank from which a `Sighting` is made.

    Attributes:
        extremes: of gradients before their reduction, each with the first stage of its bucket.
        loss: this rank's part, or None where it computes none.
        pipeline: group of this rank's pipeline. None is this rank alone.
        hidden: extremes of the hidden states that its stages have computed, each with its stage.
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
        """Keep the scalars of the step that has just been reduced."""
        return cls([(min(b.stages), value) for b in buckets for value in b.extremes], loss, pipeline, hidden)

    def origin(self) -> Source:
        """Return `origins` of the whole job. Collective call."""
        if not dist.is_initialized():
            return Source()
        ranks = [dist.get_rank()] if self.pipeline is None else dist.get_process_group_ranks(self.pipeline)
        return origins(gather(self._sighting(min(ranks)), kinds=(Sighting,)))

    def _sighting(self, pipeline: int) -> Sighting:
        in_loss = self.loss is not None and not torch.isfinite(self.loss).item()
        return Sighting(pipeline, max(_bad(self.extremes), default=-1), in_loss, min(_bad(self.hidden), default=-1))


def _bad(extremes: Extremes) -> list[int]:
    """Return the stages of the numbers that are not finite."""
    return [stage for stage, value in extremes if not torch.isfinite(value).item()]


def origins(sightings: Sequence[Sighting]) -> Source:
    """Return the ranks that made NaN or infinity; none if the data or the training did.

    A forward goes from the first stage to the last, and takes NaN along: of a pipeline, the ranks of the first stage
    whose hidden states have it are its origin, because token numbers and the hidden states before are finite.
    If none has it, a loss that is not finite comes from the labels that this pipeline has read, or from weights.
    If that is finite, too, the origin is the last stage whose gradients have it, because a backward goes the other
    way. What all of several pipelines have is no single rank's.

    Args:
        sightings: one for each rank, in rank order.
    """
    pipelines: dict[int, list[int]] = defaultdict(list)
    for rank, sighting in enumerate(sightings):
        pipelines[sighting.pipeline].append(rank)
    found = [_first(sightings, ranks) for ranks in pipelines.values()]
    if len(sightings) == 1 or (len(found) > 1 and all(each.ranks for each in found)):
        return Source()
    found = [each for each in found if each.ranks]
    forwards = {each.forward for each in found}
    return Source(
        tuple(sorted(rank for each in found for rank in each.ranks)), forwards.pop() if len(forwards) == 1 else -1
    )


def _first(sightings: Sequence[Sighting], ranks: Sequence[int]) -> Source:
    """Return the ranks of a pipeline that had it first, if neither its data nor its weights may be the cause."""
    forward = min((each for rank in ranks if (each := sightings[rank].forward) >= 0), default=-1)
    if forward >= 0:
        return Source(tuple(rank for rank in ranks if sightings[rank].forward == forward), forward)
    last = max(sightings[rank].stage for rank in ranks)
    if last < 0 or any(sightings[rank].in_loss for rank in ranks):
        return Source()
    return Source(tuple(rank for rank in ranks if sightings[rank].stage == last))
