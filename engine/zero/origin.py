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
from weft.engine.zero.members import Fragment

Extremes = Sequence[tuple[int, Tensor]]
"""Smallest and largest elements of tensors, each a scalar with the virtual stage that made the tensor."""
MOST_NAMES = 3
"""Weights that an error names, at most."""


class Source(NamedTuple):
    """Where NaN or infinity first appeared.

    Attributes:
        ranks: the ranks that produced it, or empty if the cause is the data or divergence.
        forward: virtual stage in whose forward it appeared, `HEAD_WEIGHT`, `HEAD`, or -1 for a backward.
        weights: names of some weights that were not finite before the step.
        updated: True if a step had updated these weights since they were loaded.
    """

    ranks: tuple[int, ...] = ()
    forward: int = -1
    weights: tuple[str, ...] = ()
    updated: bool = False


@dataclass(frozen=True)
class Sighting:
    """The stages of one rank with non-finite numbers in one step.

    Attributes:
        pipeline: global rank of the first rank of the pipeline.
        stage: the last stage of the rank whose gradients are not finite, or -1 if all are finite.
        in_loss: whether the rank's part of the loss is not finite.
        forward: the first stage of the rank whose hidden states are not finite, `HEAD_WEIGHT` or `HEAD` if only the
            head's weight or the logits are not, or -1 if all are finite.
        weights: names of some of the rank's weights that were not finite before the step.
        updated: see `Source.updated`.
    """

    pipeline: int
    stage: int
    in_loss: bool
    forward: int = -1
    weights: tuple[str, ...] = ()
    updated: bool = False


@dataclass(frozen=True)
class OwnNumbers:
    """This rank's scalars of a step, from which its `Sighting` is derived.

    Attributes:
        extremes: extreme elements of gradients before their reduction, each with the first stage of its bucket.
        loss: this rank's part of the loss, or None if it computes none.
        pipeline: group of this rank's pipeline. None means this rank alone.
        hidden: extreme elements of the hidden states that its stages have computed, of the head's weight and of the
            logits, each with its stage.
        weights: names of the rank's weights, each with a scalar that is not finite if the weights are not.
        frozen: the rank's weights that no step changes, which are read only to find an origin.
        updated: see `Source.updated`.
    """

    extremes: Extremes
    loss: Tensor | None
    pipeline: dist.ProcessGroup | None
    hidden: Extremes = ()
    weights: Sequence[tuple[str, Tensor]] = ()
    frozen: Sequence[Fragment] = ()
    updated: bool = False

    @classmethod
    def of_step(
        cls,
        buckets: Iterable[Bucket],
        loss: Tensor | None,
        pipeline: dist.ProcessGroup | None,
        hidden: Extremes = (),
        fragments: Sequence[Fragment] = (),
        *,
        updated: bool = False,
    ) -> OwnNumbers:
        """Collect the scalars of the step that has just been reduced, before it updates the weights."""
        extremes = [(min(b.stages), value) for b in buckets for value in b.extremes]
        frozen = [fragment for fragment in fragments if not fragment.trained]
        weights = _largest([fragment for fragment in fragments if fragment.trained])
        return cls(extremes, loss, pipeline, hidden, weights, frozen, updated)

    def origin(self) -> Source:
        """Gather the `Sighting` of every rank, and return the source by `origins`. Collective call."""
        if not dist.is_initialized():
            return origins([self._sighting(0)])
        ranks = [dist.get_rank()] if self.pipeline is None else dist.get_process_group_ranks(self.pipeline)
        return origins(gather(self._sighting(min(ranks)), kinds=(Sighting,)))

    def _sighting(self, pipeline: int) -> Sighting:
        in_loss = self.loss is not None and not torch.isfinite(self.loss).item()
        last, first = max(_bad(self.extremes), default=-1), min(_bad(self.hidden), default=-1)
        weights = [name for name, value in [*self.weights, *_largest(self.frozen)] if not torch.isfinite(value).item()]
        return Sighting(pipeline, last, in_loss, first, tuple(weights[:MOST_NAMES]), self.updated)


def _largest(fragments: Iterable[Fragment]) -> list[tuple[str, Tensor]]:
    """Return the names of weights with the largest absolute values, scalars on their device."""
    held = [fragment for fragment in fragments if fragment.tensor.is_floating_point() and fragment.tensor.numel()]
    if not held:
        return []
    largest = torch._foreach_norm([fragment.tensor.detach() for fragment in held], float("inf"))
    return [(fragment.name, value) for fragment, value in zip(held, largest, strict=True)]


def _bad(extremes: Extremes) -> list[int]:
    """Return the stages whose extremes are not finite."""
    return [stage for stage, value in extremes if not torch.isfinite(value).item()]


def origins(sightings: Sequence[Sighting]) -> Source:
    """Return the ranks that produced NaN or infinity, or a source without ranks if the cause is the data or divergence.

    A forward propagates NaN from the first stage to the last. So the origin in a pipeline is the first stage whose
    hidden states have NaN, because its inputs are finite. After the hidden states come the head's weight and the
    logits. If all are finite, a loss that is not finite comes from the labels or the objective. If the loss is finite,
    too, the origin is the last stage whose gradients have NaN, because a backward propagates NaN to earlier stages. If
    there are several pipelines and all have NaN, the cause is not a single rank, unless weights had NaN before it.

    Args:
        sightings: one for each rank, in rank order.
    """
    pipelines: dict[int, list[int]] = defaultdict(list)
    for rank, sighting in enumerate(sightings):
        pipelines[sighting.pipeline].append(rank)
    found = [_first(sightings, ranks) for ranks in pipelines.values()]
    if weights := [rank for each in found if each.forward == HEAD_WEIGHT for rank in each.ranks]:
        return Source(tuple(sorted(weights)), HEAD_WEIGHT)
    if any(each.weights for each in sightings):
        return _of_weights(sightings)
    if len(sightings) == 1 or (len(found) > 1 and all(each.ranks for each in found)):
        return Source()
    found = [each for each in found if each.ranks]
    forwards = {each.forward for each in found}
    return Source(
        tuple(sorted(rank for each in found for rank in each.ranks)), forwards.pop() if len(forwards) == 1 else -1
    )


def _of_weights(sightings: Sequence[Sighting]) -> Source:
    """Return the ranks with weights that were not finite, and those with the first stage whose forward was not."""
    names = dict.fromkeys(name for each in sightings for name in each.weights)
    first = min((each.forward for each in sightings if each.forward >= 0), default=-1)
    ranks = (rank for rank, each in enumerate(sightings) if each.weights or 0 <= each.forward == first)
    updated = any(each.updated for each in sightings)
    return Source(tuple(ranks), first, tuple(names)[:MOST_NAMES], updated)


def _first(sightings: Sequence[Sighting], ranks: Sequence[int]) -> Source:
    """Return the first origin in one pipeline, by the rules of `origins`."""
    forward = min((each for rank in ranks if (each := sightings[rank].forward) >= 0), default=-1)
    if forward >= 0:
        return Source(tuple(rank for rank in ranks if sightings[rank].forward == forward), forward)
    last = max(sightings[rank].stage for rank in ranks)
    if last < 0 or any(sightings[rank].in_loss for rank in ranks):
        return Source()
    return Source(tuple(rank for rank in ranks if sightings[rank].stage == last))
