"""Sharding: when to reduce, gather and release the gradients and weights of a rank's chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from weft.conf.schema import ZeroConfig
from weft.engine.zero.chunk import Chunk, Fragment, Member
from weft.engine.zero.collectives import Collectives
from weft.engine.zero.cutting import ShardedStage, cut
from weft.engine.zero.weights import StageWeights
from weft.pipeline.action import BACKWARD, Action, Op


class Sharding:
    """The chunks of a rank, and their collectives around the actions of a schedule.

    A chunk's gradients are reduced as soon as its last weight gradient has been computed, inside the
    last backward of its stage. Its weights are gathered as soon as they are stepped, in the order in
    which the next step uses them, and waited for where they are used. (MegaScale section 3.2,
    Centauri section 4.)
    """

    def __init__(
        self,
        stages: Iterable[ShardedStage],
        zero: ZeroConfig,
        collectives: Collectives | None = None,
        tied: Iterable[tuple[nn.Parameter, dist.ProcessGroup]] = (),
        cuts: Mapping[int, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        """Move the parameters of ``stages`` into chunks.

        Args:
            collectives: collectives over this rank's replicas; None means a single replica.
            tied: parameters that other pipeline ranks also hold, with the group of their holders.
            cuts: where to divide stages into chunks; see `cut`.
        """
        stages = sorted(stages, key=lambda stage: stage.index)
        self.collectives = collectives or Collectives()
        self.is_shared_out = zero.stage > 0 and self.collectives.num_replicas > 1
        """Whether replicas step different fragments."""
        self.chunks = cut(stages, zero, self.collectives, dict(tied), cuts)
        chunk_of = {member.parameter: chunk for chunk in self.chunks for member in chunk.members}
        self._named = {name: p for stage in stages for name, p in stage.named_global_parameters()}
        self._weights = {stage.index: StageWeights(stage, chunk_of) for stage in stages}
        self._own = {
            index: [chunk for chunk in self.chunks if chunk.trained and chunk.stages == {index}]
            for index in self._weights
        }
        self._joint = [chunk for chunk in self.chunks if chunk.trained and len(chunk.stages) > 1]
        self._reduce_every = zero.reduce_every if zero.stage >= 2 else 0
        self._closing: set[Action] = set()
        self._last: set[Action] = set()
        self._upcoming: dict[int, deque[Op]] = {}
        self._unreduced: dict[int, deque[Chunk]] = {index: deque() for index in self._weights}
        self._unended: dict[Chunk, set[int]] = {}
        self._early: dict[int, set[nn.Parameter]] = {index: set() for index in self._weights}
        self._running: Action | None = None
        self._reduced: set[Chunk] = set()
        for chunk in self.chunks:
            for member in chunk.members if chunk.trained else ():
                member.parameter.register_post_accumulate_grad_hook(partial(self._gradient_arrived, chunk, member))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self._named.values())).device

    @property
    def trained(self) -> list[Chunk]:
        """Chunks with gradients."""
        return [chunk for chunk in self.chunks if chunk.trained]

    def fragments(self) -> Iterator[Fragment]:
        """This rank's part of every parameter, including frozen ones."""
        held = {member.name for chunk in self.chunks for member in chunk.members}
        for chunk in self.chunks:
            yield from chunk.fragments
        seen = {member.parameter for chunk in self.chunks for member in chunk.members}
        for name, parameter in self._named.items():
            if name not in held and parameter not in seen:
                seen.add(parameter)
                yield Fragment(name, parameter, 0, parameter.detach(), False, True)

    # -- around the actions of a step ------------------------------------------------------------

    def begin_step(self, row: Sequence[Action]) -> None:
        """Find out which actions of ``row`` compute the last gradients, and which weights are used next."""
        self._upcoming = {index: deque() for index in self._weights}
        self._closing.clear()
        self._last.clear()
        self._unended = {chunk: set(chunk.stages) for chunk in self._joint}
        for index in self._weights:
            own = [action for action in row if action.stage == index]
            self._upcoming[index].extend(a.op for a in own if a.op in (Op.F, Op.B, Op.I))
            ends = [action for action in own if action.op in (Op.B, Op.W)]
            every = self._reduce_every or len(ends)
            self._closing.update(ends[every - 1 :: every], ends[-1:])
            self._last.update(ends[-1:])

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Context around a forward or backward of a stage."""
        weights = self._weights[action.stage]
        if action.op is not Op.W:
            weights.begin(backward=action.op in BACKWARD)
            if upcoming := self._upcoming.get(action.stage):
                upcoming.popleft()
        if action in self._closing:
            self._close(action)
        self._running = action
        yield
        self._running = None
        self._reduced.clear()
        if action in self._closing and action not in self._last:
            self._reduce_rest(action.stage)
        if action.op is Op.F:
            assert all(chunk.is_settled for chunk in weights.chunks), "a forward has passed a block by"

    def _close(self, action: Action) -> None:
        """From now on, reduce each chunk when all of its gradients have arrived."""
        early = self._early[action.stage] if action.op is Op.W else set()
        for chunk in self._own[action.stage]:
            parameters = (member.parameter for member in chunk.members)
            # A vector's gradient came with the input gradient, unless it was deferred.
            chunk.missing = {p for p in parameters if p.ndim >= 2 or p not in early}
        self._unreduced[action.stage].extend(reversed(self._own[action.stage]))

    def _gradient_arrived(self, chunk: Chunk, member: Member, parameter: nn.Parameter) -> None:
        assert chunk not in self._reduced, f"{member.name}: a gradient came after the last one"
        chunk.add_gradient(parameter, chunk.gradient_place(member))
        if self._running is None:
            return
        stage = self._running.stage
        if self._running.op is Op.I:
            self._early[stage].add(parameter)
        # In a fixed order, which is the same on all replicas.
        while self._unreduced[stage] and not self._unreduced[stage][0].missing:
            self._reduced.add(self._unreduced[stage][0])
            self._unreduced[stage].popleft().reduce()

    def _reduce_rest(self, stage: int) -> None:
        while self._unreduced[stage]:
            self._unreduced[stage].popleft().reduce()

    def reduce(self, stage: int) -> None:
        """``REDUCE_GRAD``: start the remaining reductions of ``stage``."""
        self._reduce_rest(stage)
        for chunk, stages in self._unended.items():
            stages.discard(stage)
            if not stages:
                self._unreduced[stage].append(chunk)
        self._unended = {chunk: stages for chunk, stages in self._unended.items() if stages}
        self._reduce_rest(stage)

    def unshard(self, stage: int) -> None:
        """``UNSHARD``: start to gather the weights that the next computation of ``stage`` uses first."""
        upcoming = self._upcoming.get(stage, deque())
        self._weights[stage].prefetch(backward=bool(upcoming) and upcoming[0] is not Op.F)

    def reshard(self, stage: int) -> None:
        """``RESHARD``: release the weights of ``stage``."""
        self._weights[stage].release()

    # -- around the optimiser's step ---------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Wait until every gradient has been reduced."""
        for chunk in self.trained:
            chunk.finish_gradient()

    def publish(self) -> None:
        """Copy stepped fragments into the model, in the order in which forwards use them."""
        for chunk in self.chunks:
            if chunk.trained:
                chunk.publish()
        self._weights[min(self._weights)].prefetch()

    def settle(self) -> None:
        """Wait for all collectives in progress."""
        for chunk in self.chunks:
            chunk.settle_weights()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Context in which every parameter has its full value; a collective call over the replicas."""
        for chunk in self.chunks:
            chunk.wait()
        yield
        for chunk in self.chunks:
            chunk.release()
