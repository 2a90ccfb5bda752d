"""A bucket: parameters of a virtual stage in one flat buffer, divided into equal shards over the replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.channel import Handle
from weft.engine.models.state_blocks import block_of, set_block
from weft.engine.parallel.cut import Cut
from weft.engine.precision import computed_dtype
from weft.engine.zero.collectives import Collectives
from weft.engine.zero.kernels.accumulation import accumulate
from weft.engine.zero.members import Fragment, Member, Named, lay_out

EXCHANGED_AT_ONCE = 1 << 24
"""Number of weights that `Bucket.exchange` moves at once, which takes as much memory on the device."""
User = tuple[int, bool | None]
"""A virtual stage, and True for its backward, or None for its weight gradients. Each of these has at most one
computation at a time."""


class Bucket:
    """Weights and gradients of several parameters, all of one dtype, and all trained or all frozen.

    At ZeRO stage 0 (Rajbhandari et al. 2020, section 5) a replica permanently stores everything. From stage 1 on
    it stores only its shard of the master weights and optimiser state. From stage 2 on the same holds for
    gradients, and at stage 3 for weights. 16-bit weights have separate fp32 master weights. An fp32 weight is its
    own master. Gradients accumulate in the master's dtype.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        *,
        stages: frozenset[int],
        zero_stage: int,
        collectives: Collectives,
        tied: dist.ProcessGroup | None = None,
        cuts: Mapping[str, Cut] = MappingProxyType({}),
        owners: Sequence[int] = (),
    ) -> None:
        """Move the parameters into the bucket's buffer.

        Args:
            parameters: the parameters, with their names in the whole model.
            stages: this rank's virtual stages that use them.
            tied: group of the ranks of this pipeline that also hold them.
            cuts: by name, this rank's part of each parameter that it does not hold as a whole.
            owners: the replica in whose shard each parameter lies whole. Shards are padded to one length. Empty: shards
                end anywhere.
        """
        first = parameters[0][1]
        self.stages = stages
        self.tied = tied
        self.trained = first.requires_grad
        self.counted = not getattr(first, "ds_pipe_replicated", False)
        self.missing: Counter[nn.Parameter] = Counter()
        """Number of gradients of each parameter that must still accumulate before the bucket is reduced."""
        self.extremes: list[Tensor] = []
        """Smallest and largest elements of this rank's own gradients: two scalars for each reduction of this step."""
        self.present: set[Member] = set()
        """Members that have had a gradient in this step, on this rank."""
        self.keeps_gradients = zero_stage < 2
        """True if gradients stay whole until the end of the step. Otherwise each reduction ends with a new buffer."""
        self._collectives = collectives
        share, self.members = lay_out(parameters, collectives.num_replicas, owners)
        self.length = share * collectives.num_replicas
        self.gathers = zero_stage > 0 and collectives.num_replicas > 1
        """True if the full weights are gathered from replicas, after each step or on demand."""
        self._share = slice(collectives.replica * share, (collectives.replica + 1) * share)
        self._held = self._share if zero_stage else slice(0, self.length)
        self.sharded = zero_stage == 3 and self.gathers
        """True if the full weights are only gathered on demand (ZeRO-3)."""
        self.users: set[User | None] = set()
        """Running computations that need the full weights."""
        self.accumulates = False
        """True if autograd accumulates the members' gradients in the buffer. See `accumulate`."""
        self._buffer: Tensor | None = None
        self._places: list[Tensor] = []
        """Members' views of the buffer."""
        self._versions: list[int] = []
        """Versions of these views before the first gradient."""
        self._parts: list[tuple[Fragment, Tensor]] = []
        """Fragments with their part of a gradient that stays."""
        self._gradient: Tensor | None = None
        self._squares: Tensor | None = None
        """Sums of squares of parts of the gradient, if its last accumulation computed them."""
        self._reduction: Handle | None = None
        self._gathering: Handle | None = None
        self._adopt_weights(first)
        self.fragments = tuple(self._fragments(cuts, shared=zero_stage == 0))

    @torch.no_grad()
    def _adopt_weights(self, like: nn.Parameter) -> None:
        self._weights = torch.zeros(self.length, dtype=computed_dtype(like), device=like.device)
        low = self.trained and self._weights.itemsize == 2
        master = self._weights.new_zeros(self._held.stop - self._held.start, dtype=torch.float32) if low else None
        for member in self.members:
            if master is not None:
                begin, end = self._span(member)
                part = member.parameter.flatten()[begin - member.offset : end - member.offset]
                master[begin - self._held.start : end - self._held.start].copy_(part)
            member.of(self._weights).copy_(member.parameter)
            member.parameter.data = member.of(self._weights)
            if low:
                member.parameter.grad_dtype = None  # any: gradients accumulate in fp32
        self._shard = self._weights[self._held]
        if self.sharded:
            self._shard = self._shard.clone()
        self._master = self._shard if master is None else master
        self._whole = True
        self.release()

    def _span(self, member: Member) -> tuple[int, int]:
        """Return where this rank's part of a parameter starts and ends in the bucket."""
        begin = max(self._held.start, member.offset)
        return begin, max(begin, min(self._held.stop, member.offset + member.parameter.numel()))

    def _fragments(self, cuts: Mapping[str, Cut], *, shared: bool) -> Iterator[Fragment]:
        low = self._held.start
        for member in self.members:
            begin, end = self._span(member)
            if end > begin or (member.parameter.numel() == 0 and low == 0):
                part = self._master[begin - low : end - low]
                if part.numel() == member.parameter.numel():
                    part = part.view(member.parameter.shape)
                set_block(part, block_of(member.parameter))
                start = begin - member.offset
                yield Fragment(member.name, member.parameter, start, part, self.trained, shared, cuts.get(member.name))

    # -- gradients -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Drop gradients of backwards that no step has run, and accumulate those of this step."""
        self._detach()
        if self.keeps_gradients:
            self.accumulate()

    @torch.no_grad()
    def accumulate(self) -> None:
        """From now on autograd adds gradients to the buffer, without a hook. Gradients that have arrived move there."""
        if self._buffer is None:
            self._buffer = torch.zeros(self.length, dtype=self._master.dtype, device=self._master.device)
        else:
            self._buffer.zero_()
        # `data` has a version of its own, which tells whether a gradient has arrived
        self._places = self._places or [member.of(self._buffer).data for member in self.members]
        self._versions = [place._version for place in self._places]
        for member, place in zip(self.members, self._places, strict=True):
            earlier, member.parameter.grad = member.parameter.grad, place
            if earlier is not None:
                place.add_(earlier)
        self.accumulates = True

    def count_gradient(self, parameter: nn.Parameter) -> None:
        """Count one of the gradients that are `missing`."""
        self.missing[parameter] -= 1
        if self.missing[parameter] <= 0:
            del self.missing[parameter]

    def _detach(self) -> None:
        """Leave the next gradients to the parameters, and forget a buffer that does not stay."""
        for member in self.members:
            member.parameter.grad = None
        self.accumulates = False
        if not self.keeps_gradients:
            self._buffer, self._places = None, []

    def reduce(self) -> None:
        """Start to reduce over the replicas the gradients that have accumulated since the last call."""
        if not self.accumulates:
            self.accumulate()
        whole = self._buffer
        assert whole is not None
        arrivals = zip(self.members, self._places, self._versions, strict=True)
        self.present.update(member for member, place, version in arrivals if place._version != version)
        self.missing.clear()
        self._detach()
        self.extremes.extend(torch.aminmax(whole))
        if self.keeps_gradients:
            self._gradient = whole[self._held]
            self._parts = self._parts or list(self._parts_of(self._gradient))
            self._reduction = self._collectives.reduce(whole, self._gradient)
            return
        self._settle()
        self._reduction = self._collectives.reduce(whole)

    def _settle(self) -> None:
        """Wait for the reduction, and accumulate its sum into the gradient."""
        if self._reduction is None:
            return
        received, self._reduction, self._squares = self._reduction.wait(), None, None
        if received is self._gradient:
            return
        adds = self._gradient is not None and not self.keeps_gradients
        if self._gradient is None:
            if received.dtype == self._master.dtype:
                self._gradient = received
                return
            self._gradient = torch.empty_like(received, dtype=self._master.dtype)
        self._squares = accumulate(self._gradient, received, adds=adds)

    def finish_gradient(self) -> None:
        """Wait for the reduction, then sum gradients of tied weights over their holders."""
        self._settle()
        assert self._gradient is not None, "every bucket is reduced in every step"
        if self.tied is not None:
            dist.all_reduce(self._gradient, group=self.tied)
            self._squares = None

    @property
    def counted_gradient(self) -> Tensor:
        """Return the elements of the reduced gradient that this rank counts in norms. Each counts on one rank."""
        assert self._gradient is not None
        share = self._share if self._gradient.numel() == self.length else slice(None)
        return self._gradient[share if self.counted else slice(0)]

    @property
    def counted_squares(self) -> Tensor | None:
        """Return sums of squares of parts of `counted_gradient`, or None if none were computed on the way."""
        is_all = self.counted and self.gradient.numel() == self._shard.numel()
        return self._squares if is_all else None

    @property
    def gradient(self) -> Tensor:
        """Return the reduced gradient of this rank's fragments, flat."""
        assert self._gradient is not None
        return self._gradient

    def assign_gradients(self, absent: Set[nn.Parameter] = frozenset()) -> None:
        """Set the ``grad`` of fragments to their part of the reduced gradient, except for ``absent`` parameters."""
        for fragment, part in self._parts or self._parts_of(self.gradient):
            if not absent or fragment.parameter not in absent:
                fragment.tensor.grad = part

    def _parts_of(self, gradient: Tensor) -> Iterator[tuple[Fragment, Tensor]]:
        offsets = {member.name: member.offset for member in self.members}
        for fragment in self.fragments:
            begin = offsets[fragment.name] + fragment.start - self._held.start
            part = gradient[begin : begin + fragment.tensor.numel()]
            yield fragment, part.view(fragment.tensor.shape)

    def drop_gradient(self) -> None:
        """Drop the gradient of the step."""
        self._gradient = self._squares = None
        self.extremes = []
        self.present.clear()
        for fragment in self.fragments:
            fragment.tensor.grad = None

    def drop_step(self) -> None:
        """Drop all of a step that an error has interrupted."""
        self._reduction = None
        self.missing.clear()
        self._detach()
        self.drop_gradient()

    # -- weights ---------------------------------------------------------------------------------

    @property
    def held_weights(self) -> tuple[Tensor, ...]:
        """Return the weights that this rank stores permanently: its shard, and the fp32 masters of a 16-bit shard."""
        return (self._shard, self._master) if self.has_masters else (self._shard,)

    @property
    def stored(self) -> Tensor:
        """Return the weights of computations that this rank stores between steps, flat: its shard at ZeRO stage 3."""
        return self._shard if self.sharded else self._weights

    @property
    def has_masters(self) -> bool:
        """True if the optimiser updates separate fp32 master weights."""
        return self._master is not self._shard

    def whole_master(self) -> Tensor:
        """Return all weights, flat, in the precision of the optimiser's updates. Collective call over the replicas."""
        if self._master.numel() == self.length:
            return self._master
        whole = self._master.new_empty(self.length)
        self._collectives.gather(self._master, whole).wait()
        return whole

    @torch.no_grad()
    def publish(self) -> None:
        """Copy fragments that were updated or restored into the model. Call `wait` before the weights are used.

        At ZeRO stages 1 and 2 this starts to gather the full weights. At stage 3 it frees them.
        """
        self.settle_weights()
        if self.has_masters:
            self._shard.copy_(self._master)
        if self.sharded:
            self.release()
        elif self.gathers:
            self._gathering = self._collectives.gather(self._shard, self._weights)

    def gather(self, user: User | None = None) -> None:
        """Start the all-gather of the weights if they are not complete. They stay until each user releases them."""
        self.users |= {user} - {None}
        if not self._whole and self._gathering is None:
            self._weights.untyped_storage().resize_(self._weights.nbytes)
            self._gathering = self._collectives.gather(self._shard, self._weights)

    def wait(self, user: User | None = None) -> None:
        """Gather the weights as `gather` does, and block until they are complete."""
        self.gather(user)
        self.settle_weights()

    def settle_weights(self) -> None:
        """Wait for an all-gather in progress."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._whole = True

    def order_after_gather(self) -> None:
        """Make the current stream wait for an all-gather in progress that also writes this rank's fragment.

        It writes there what is there already, so a reader that comes before it reads the same values.
        """
        if self._gathering is not None and not self.sharded:
            self._gathering.wait()

    def release(self, user: User | None = None) -> None:
        """End the use by ``user``. At ZeRO stage 3 the full weights are freed when no user is left."""
        self.users.discard(user)
        if self.sharded and not self.users:
            self._free()

    def _free(self) -> None:
        self.settle_weights()
        self._weights.untyped_storage().resize_(0)
        self._whole = False

    @torch.no_grad()
    def exchange(self, other: Tensor) -> None:
        """Exchange `stored` with the elements of ``other``, in host memory. No computation may use the weights."""
        self.settle_weights()
        if self.sharded:
            self._free()  # a gather ahead of the next computation has the weights before the exchange
        for weights, others in zip(self.stored.split(EXCHANGED_AT_ONCE), other.split(EXCHANGED_AT_ONCE), strict=True):
            moved = weights.clone()
            weights.copy_(others)
            others.copy_(moved)

    @property
    def is_settled(self) -> bool:
        """True if no all-gather is in progress."""
        return self._gathering is None
