"""Origin of NaN and infinity: the ranks whose own gradients had them first, before any sum over replicas.

Nothing is exchanged in a step whose norm is finite. Each rank keeps a few scalars on its device, and reads them
once all ranks have seen a norm that is not finite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.exchange import gather
from weft.engine.zero.bucket import Bucket


@dataclass(frozen=True)
class Sighting:
    """The numbers of one rank in one step that are not finite.

    Attributes:
        pipeline: first rank of its pipeline.
        stage: the last of its stages whose own gradients are not finite; -1 if all are finite.
        in_loss: whether its part of the loss is not finite.
    """

    pipeline: int
    stage: int
    in_loss: bool


@dataclass(frozen=True)
class OwnNumbers:
    """Scalars of this rank from which a `Sighting` is made.

    Attributes:
        extremes: of gradients before their reduction, each with the first stage of its bucket.
        loss: this rank's part; None where it computes none.
        pipeline: group of this rank's pipeline; None is this rank alone.
    """

    extremes: Sequence[tuple[int, Tensor]]
    loss: Tensor | None
    pipeline: dist.ProcessGroup | None

    @classmethod
    def of_step(cls, buckets: Iterable[Bucket], loss: Tensor | None, pipeline: dist.ProcessGroup | None) -> OwnNumbers:
        """Keep the scalars of the step that has just been reduced."""
        return cls([(min(b.stages), value) for b in buckets for value in b.extremes], loss, pipeline)

    def origin(self) -> tuple[int, ...]:
        """Return `origins` of the whole job; a collective call."""
        if not dist.is_initialized():
            return ()
        ranks = [dist.get_rank()] if self.pipeline is None else dist.get_process_group_ranks(self.pipeline)
        return origins(gather(self._sighting(min(ranks)), kinds=(Sighting,)))

    def _sighting(self, pipeline: int) -> Sighting:
        stages = [stage for stage, value in self.extremes if not torch.isfinite(value).item()]
        in_loss = self.loss is not None and not torch.isfinite(self.loss).item()
        return Sighting(pipeline, max(stages, default=-1), in_loss)


def origins(sightings: Sequence[Sighting]) -> tuple[int, ...]:
    """Return the ranks that made NaN or infinity; empty if the data or the training did.

    A backward goes from the last stage to the first, and takes NaN along: of a pipeline, the ranks of the last stage
    that has it are the first. A loss that is not finite comes from the data that this pipeline has read, or from
    weights. What all of several pipelines have is no single rank's.

    Args:
        sightings: one for each rank, in rank order.
    """
    pipelines: dict[int, list[int]] = defaultdict(list)
    for rank, sighting in enumerate(sightings):
        pipelines[sighting.pipeline].append(rank)
    found = [_first(sightings, ranks) for ranks in pipelines.values()]
    if len(sightings) == 1 or (len(found) > 1 and all(found)):
        return ()
    return tuple(sorted(rank for ranks in found for rank in ranks))


def _first(sightings: Sequence[Sighting], ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that had it first, if its loss is finite."""
    last = max(sightings[rank].stage for rank in ranks)
    if last < 0 or any(sightings[rank].in_loss for rank in ranks):
        return []
    return [rank for rank in ranks if sightings[rank].stage == last]
