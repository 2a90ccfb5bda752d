"""Sharding: when to reduce gradients, and to gather and release weights, of a rank's buckets."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.conf.schema import ZeroConfig
from weft.engine.zero.bucket import Bucket
from weft.engine.zero.collectives import Collectives
from weft.engine.zero.division import ShardedStage, divide
from weft.engine.zero.kernels.accumulation import compile_for
from weft.engine.zero.members import Fragment, Member
from weft.engine.zero.weights import StageWeights
from weft.pipeline.action import BACKWARD, Action, Op


class Sharding:
    """The buckets of a rank, with the collectives that a schedule's actions start or wait for.

    The reduction of a bucket starts as soon as its last weight gradient has been computed, inside the last
    backward of its stage. The all-gathers start as soon as the optimiser has updated the weights, in the order in
    which the next step uses them. A computation waits only for the weights that it uses. (MegaScale section 3.2,
    Centauri section 4.)
    """

    def __init__(
        self,
        stages: Iterable[ShardedStage],
        zero: ZeroConfig,
        collectives: Collectives | None = None,
        tied: Iterable[tuple[nn.Parameter, dist.ProcessGroup]] = (),
        bucket_ends: Mapping[int, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        """Move the parameters of ``stages`` into buckets.

        Args:
            collectives: collectives over this rank's replicas. None means a single replica.
            tied: parameters that other pipeline ranks also hold, with the group of their holders.
            bucket_ends: where buckets end. See `divide`.
        """
        stages = sorted(stages, key=lambda stage: stage.index)
        self.collectives = collectives or Collectives()
        self.is_shared_out = zero.stage > 0 and any(kind.num_replicas > 1 for kind in self.collectives.kinds)
        """True if replicas step different fragments of the parameters that they share."""
        self.buckets = divide(stages, zero, self.collectives, dict(tied), bucket_ends)
        bucket_of = {member.parameter: bucket for bucket in self.buckets for member in bucket.members}
        self._named = {name: p for stage in stages for name, p in stage.named_global_parameters()}
        self.cuts = {name: cut for stage in stages for name, cut in stage.cuts.items()}
        """Parts of divided matrices that this rank holds, by global names."""
        self._weights = {stage.index: StageWeights(stage, bucket_of) for stage in stages}
        self._own = {
            index: [bucket for bucket in self.buckets if bucket.trained and bucket.stages == {index}]
            for index in self._weights
        }
        self._joint = [bucket for bucket in self.buckets if bucket.trained and len(bucket.stages) > 1]
        self._reduce_every = zero.reduce_every if zero.stage >= 2 else 0
        sent = {kind.gradient_format for kind in self.collectives.kinds if kind.num_replicas > 1} - {torch.float32}
        compile_for(self.device, sent | ({torch.float32} if self._reduce_every else set()))
        self._closing: set[Action] = set()
        self._last: set[Action] = set()
        self._upcoming: dict[int, deque[Op]] = {}
        self._unreduced: dict[int, deque[Bucket]] = {index: deque() for index in self._weights}
        self._unended: dict[Bucket, set[int]] = {}
        self._running: Action | None = None
        self._reduced: set[Bucket] = set()
        self._hooks: dict[Bucket, list[RemovableHandle]] = {}
        """Hooks of gradients. They cost host time, so there are none where autograd alone accumulates."""
        self.overlaps = any(kind.num_replicas > 1 for kind in self.collectives.kinds)
        """True if each bucket is reduced as soon as its last gradient has arrived."""

    def close(self) -> None:
        """Remove autograd's hooks, because the garbage collector does not see their references."""
        for bucket in list(self._hooks):
            self._unhook(bucket)
        self.collectives.close()

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self._named.values())).device

    @property
    def trained(self) -> list[Bucket]:
        """The buckets whose parameters are trained."""
        return [bucket for bucket in self.buckets if bucket.trained]

    def fragments(self) -> Iterator[Fragment]:
        """Yield this rank's part of every parameter, including frozen ones."""
        held = {member.name for bucket in self.buckets for member in bucket.members}
        for bucket in self.buckets:
            yield from bucket.fragments
        seen = {member.parameter for bucket in self.buckets for member in bucket.members}
        for name, parameter in self._named.items():
            if name not in held and parameter not in seen:
                seen.add(parameter)
                yield Fragment(name, parameter, 0, parameter.detach(), False, True, self.cuts.get(name))

    # -- around the actions of a step ------------------------------------------------------------

    def begin_step(self, row: Sequence[Action]) -> None:
        """Find the actions of ``row``, this rank's actions in the step, after which gradients are reduced."""
        self._upcoming = {index: deque() for index in self._weights}
        self._closing.clear()
        self._last.clear()
        self._unended = {bucket: set(bucket.stages) for bucket in self._joint}
        for bucket in self.trained:
            bucket.begin_step()
            (self._unhook if bucket.accumulates else self._hook)(bucket)
        for index in self._weights:
            own = [action for action in row if action.stage == index]
            self._upcoming[index].extend(a.op for a in own if a.op in (Op.F, Op.B, Op.I))
            ends = [action for action in own if action.op in (Op.B, Op.W)]
            every = self._reduce_every or len(ends)
            self._closing.update(ends[every - 1 :: every], ends[-1:])
            self._last.update(ends[-1:])

    def drop_step(self) -> None:
        """Drop all gradients and what is left to reduce, because an error has interrupted the step."""
        self._running = None
        self._reduced.clear()
        for buckets in self._unreduced.values():
            buckets.clear()
        for bucket in self.trained:
            bucket.drop_step()

    @contextmanager
    def around(
        self, action: Action, coming: Callable[[], Counter[nn.Parameter] | None] = lambda: None
    ) -> Iterator[None]:
        """Provide a stage's weights to a forward or backward, and start the reductions that a backward completes.

        The context is entered in the thread that computes. A forward and a backward may be interleaved.

        Args:
            coming: returns, for each parameter, the number of gradients that accumulate in the context. None means one
                for each.
        """
        weights, backward = self._weights[action.stage], action.op in BACKWARD
        if action.op is not Op.W:
            weights.begin(backward=backward)
            if upcoming := self._upcoming.get(action.stage):
                upcoming.popleft()
        if action in self._closing:
            self._close(action.stage, coming())
        if action.op is not Op.F:
            self._running = action
        yield
        weights.end(backward=backward)
        if action.op is Op.F:
            unsettled = [bucket for bucket in weights.buckets if not bucket.is_settled]
            assert all(bucket.users for bucket in unsettled), "a forward has passed a block by"
            return
        self._running = None
        self._reduced.clear()
        if action in self._closing and action not in self._last:
            self._reduce_rest(action.stage)

    def _close(self, stage: int, coming: Counter[nn.Parameter] | None) -> None:
        """From now on, reduce each bucket of ``stage`` when its last gradient has accumulated."""
        for bucket in self._own[stage]:
            parameters = [member.parameter for member in bucket.members]
            bucket.missing = Counter(parameters if coming is None else {p: coming[p] for p in parameters if coming[p]})
            if self.overlaps:
                self._hook(bucket)
        self._unreduced[stage].extend(reversed(self._own[stage]))

    def _hook(self, bucket: Bucket) -> None:
        if bucket not in self._hooks:
            self._hooks[bucket] = [
                member.parameter.register_post_accumulate_grad_hook(partial(self._gradient_arrived, bucket, member))
                for member in bucket.members
            ]

    def _unhook(self, bucket: Bucket) -> None:
        for hook in self._hooks.pop(bucket, ()):
            hook.remove()

    def _gradient_arrived(self, bucket: Bucket, member: Member, parameter: nn.Parameter) -> None:
        assert bucket not in self._reduced, f"{member.name}: a gradient came after the last one"
        if not bucket.accumulates:
            bucket.accumulate()
        if not bucket.missing:
            self._unhook(bucket)
            return
        bucket.count_gradient(parameter)
        if self._running is None:
            return
        stage = self._running.stage
        # In a fixed order, which is the same on all replicas.
        while self._unreduced[stage] and not self._unreduced[stage][0].missing:
            self._reduced.add(self._unreduced[stage][0])
            self._reduce_first(stage)

    def _reduce_first(self, stage: int) -> None:
        bucket = self._unreduced[stage].popleft()
        bucket.reduce()
        if not bucket.keeps_gradients:
            self._hook(bucket)

    def _reduce_rest(self, stage: int) -> None:
        while self._unreduced[stage]:
            self._reduce_first(stage)

    def reduce(self, stage: int) -> None:
        """Run ``REDUCE_GRAD``: start the remaining reductions of ``stage``, and of shared buckets that it uses last."""
        for bucket, stages in self._unended.items():
            stages.discard(stage)
            if not stages:
                self._unreduced[stage].append(bucket)
        self._unended = {bucket: stages for bucket, stages in self._unended.items() if stages}
        self._reduce_rest(stage)

    def unshard(self, stage: int) -> None:
        """Run ``UNSHARD``: start to gather the weights that the next computation of ``stage`` uses first."""
        upcoming = self._upcoming.get(stage, deque())
        self._weights[stage].prefetch(backward=bool(upcoming) and upcoming[0] is not Op.F)

    def reshard(self, stage: int) -> None:
        """Run ``RESHARD``: release the weights of ``stage``."""
        self._weights[stage].release()

    # -- around the optimiser's step ---------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Wait until every gradient has been reduced."""
        for bucket in self.trained:
            bucket.finish_gradient()

    def publish(self) -> None:
        """Copy the fragments that the optimiser has updated into the model, in forward order, and start all-gathers."""
        for bucket in self.buckets:
            if bucket.trained:
                bucket.publish()
        self._weights[min(self._weights)].prefetch()

    def settle(self) -> None:
        """Wait for all collectives in progress."""
        for bucket in self.buckets:
            bucket.settle_weights()

    def order_after_gathers(self) -> None:
        """Make the current stream wait for the all-gathers in progress, so that it may read fragments."""
        for bucket in self.buckets:
            bucket.order_after_gather()

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Context in which every parameter has its full value. Collective call over the replicas."""
        for bucket in self.buckets:
            bucket.wait()
        yield
        for bucket in self.buckets:
            bucket.release()
