"""Detection of silent data corruption: replicas compare checksums of their common state during training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from weft.comm.exchange import gather
from weft.comm.sums import ReplicaSum
from weft.engine.zero.finite import HostCopy
from weft.engine.zero.sharding import Sharding

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes."""
_MOST_NAMES = 3
"""Most tensors that a message names."""


class ReplicasDiffer(RuntimeError):
    """The weights or states of replicas differ. Raised on every rank, between steps.

    Attributes:
        good_step: last step after which a comparison found the replicas equal.
        ranks: the ranks that differ from the majority, or all ranks that differ if there is no majority.
    """

    def __init__(self, message: str, good_step: int, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.good_step, self.ranks = good_step, tuple(ranks)


@dataclass(frozen=True)
class _Difference:
    """A difference that a rank has detected among its replicas.

    Attributes:
        text: description, or empty if the replicas agree.
        ranks: see `ReplicasDiffer`.
    """

    text: str = ""
    ranks: tuple[int, ...] = ()


class _Pending(NamedTuple):
    step: int
    copy: HostCopy
    found: _Difference = _Difference()


class Comparison:
    """Compares weights, and at ZeRO stage 0 master weights and the optimiser's state, over the replicas of a rank.

    A checksum is the sum of a tensor's bits, read as integers, modulo 2^64. It does not depend on the order of
    addition, and any single flipped bit changes it. The comparison of one state takes three steps. The first step
    computes the checksums before it changes the weights. In the second, each rank compares its replicas' checksums
    and starts an all-reduce of the result over all ranks. In the third, every rank reads the result.
    """

    def __init__(
        self,
        sharding: Sharding,
        optimizer: Optimizer,
        *,
        every: int,
        replica: int,
        replicas: Sequence[int],
        group: dist.ProcessGroup | None,
        expert: int = 1,
        experts: Collection[str] = (),
    ) -> None:
        """Compare every ``every`` steps, or never if it is 0.

        Args:
            replica: this rank's index in ``replicas``.
            replicas: global ranks of this rank and its replicas, in order.
            group: process group of ``replicas``.
            expert: number of ranks that share a layer's experts. They are consecutive in ``replicas``, so every
                ``expert``-th replica has the same experts.
            experts: names of the experts' parameters.
        """
        self._sharding, self._optimizer = sharding, optimizer
        self._every = every if len(replicas) > 1 else 0
        self._replica, self._ranks, self._group = replica, replicas, group
        self._expert, self._experts = expert, experts
        self._copies = HostCopy(sharding.device), HostCopy(sharding.device)
        self._compared: _Pending | None
        self._told: _Pending | None
        self._differs_at: int | None
        self._next_step: int
        self._begin(0)

    @classmethod
    def of_replicas(
        cls, sharding: Sharding, optimizer: Optimizer, *, every: int, group: dist.ProcessGroup, expert: int
    ) -> Comparison:
        """Create a comparison over the ranks of ``group``. For arguments see the constructor."""
        return cls(
            sharding,
            optimizer,
            every=every,
            replica=dist.get_rank(group),
            replicas=dist.get_process_group_ranks(group),
            group=group,
            expert=expert,
            experts={name for name, cut in sharding.cuts.items() if cut.axis == "expert"},
        )

    # -- in a step -------------------------------------------------------------------------------

    def before_update(self, step: int) -> None:
        """Do the part of the comparison that is due before the optimiser's update in ``step``, counted from 1.

        Asynchronous collective call.
        """
        if not self._every:
            return
        if step != self._next_step:
            self._begin(step - 1)
        self._next_step = step + 1
        self._hear()
        self._look()
        if step % self._every == 0:
            self._start(step - 1)

    def _begin(self, done: int) -> None:
        """Restart after ``done`` steps, when all replicas are equal because they were initialised or restored."""
        self._compared = self._told = self._differs_at = None
        self._found, self._good_step, self._next_step = _Difference(), done, done + 1

    def _start(self, done: int) -> None:
        table = torch.zeros(len(self._ranks), len(self.names), dtype=torch.int64, device=self._sharding.device)
        table[self._replica] = self._checksums()
        self._compared = _Pending(done, self._copies[0])
        self._copies[0].send(ReplicaSum(table, self._group).wait)

    def _look(self) -> None:
        """Compare the replicas' checksums of the previous step, and start to reduce the result over all ranks."""
        if self._compared is None:
            return
        (done, copy, _), self._compared = self._compared, None
        found = self._describe(copy.read())
        flag = torch.full((), bool(found.text), dtype=torch.int32, device=self._sharding.device)
        self._told = _Pending(done, self._copies[1], found)
        self._copies[1].send(ReplicaSum(flag, dist.group.WORLD).wait)

    def _hear(self) -> None:
        """Read the reduced result: whether any rank has detected a difference."""
        if self._told is None:
            return
        (done, copy, found), self._told = self._told, None
        if self._differs_at is not None:
            return  # after an update, an all-gather may have repaired the weights
        if copy.read():
            self._differs_at, self._found = done, found
        else:
            self._good_step = done

    # -- between steps ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise an error if a difference was detected.

        Raises:
            ReplicasDiffer: on every rank.
        """
        if self._differs_at is None:
            return
        found = [each for each in gather(self._found, kinds=(_Difference,)) if each.text]
        texts = "; ".join(dict.fromkeys(each.text for each in found))
        raise ReplicasDiffer(
            f"after step {self._differs_at}: replicas differ: {texts}. They were equal after "
            f"step {self._good_step}: a device or its memory has changed a number without an error. Test the host with "
            "weft doctor node; the newest checkpoint in storage is from before",
            self._good_step,
            sorted({rank for each in found for rank in each.ranks}),
        )

    def now(self, step: int) -> None:
        """Compare immediately, after ``step`` steps, and wait for the result. Collective call, between steps.

        Raises:
            ReplicasDiffer: on every rank.
        """
        if not self._every:
            return
        if step + 1 != self._next_step:
            self._begin(step)
        self._hear()
        self._look()
        self._hear()
        if self._differs_at is None:
            self._start(step)
            self._look()
            self._hear()
        self.check()

    # -- checksums -------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Return the names of the compared tensors."""
        return [label for label, _, _ in self._tensors()]

    def _tensors(self) -> Iterator[tuple[str, str, list[Tensor]]]:
        """Yield the name of each compared tensor, its parameter's name, and the tensors with its elements."""
        for bucket in self._sharding.buckets:
            if not bucket.sharded:
                yield from ((member.name, member.name, [member.parameter.data]) for member in bucket.members)
        if self._sharding.is_shared_out:
            return
        for fragment in self._sharding.fragments():
            if fragment.trained:
                state = self._optimizer.state.get(fragment.tensor, {})
                kept = [value for _, value in sorted(state.items()) if isinstance(value, Tensor) and value.ndim]
                own = fragment.tensor.detach()
                if own.data_ptr() != fragment.parameter.data_ptr():
                    kept.append(own)  # the master weights
                yield f"the optimiser's state of {fragment.name}", fragment.name, kept

    @torch.no_grad()
    def _checksums(self) -> Tensor:
        self._sharding.settle()
        nothing = torch.zeros((), dtype=torch.int64, device=self._sharding.device)
        sums = [sum(((2 * i + 1) * checksum(t) for i, t in enumerate(held)), nothing) for *_, held in self._tensors()]
        return torch.stack(sums) if sums else nothing.new_zeros(0)

    def _describe(self, table: Tensor) -> _Difference:
        """Describe the differences in ``table``: the checksums by replica and tensor."""
        found: dict[tuple[tuple[int, ...], int], list[str]] = {}
        for column, (label, name, _) in enumerate(self._tensors()):
            stride = self._expert if name in self._experts else 1
            same = range(self._replica % stride, len(self._ranks), stride)
            sums = table[same.start :: stride, column]
            if (sums != sums[0]).any():
                wrong = tuple(same[index] for index in differing(sums.tolist()))
                found.setdefault((wrong, len(same)), []).append(label)
        text = "; ".join(self._say(replicas, count, names) for (replicas, count), names in found.items())
        all_wrong = sorted({replica for replicas, _ in found for replica in replicas})
        return _Difference(text, tuple(self._ranks[replica] for replica in all_wrong))

    def _say(self, replicas: tuple[int, ...], count: int, names: list[str]) -> str:
        """Describe which of ``count`` replicas are wrong."""
        where = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))
        ranks = ", ".join(str(self._ranks[replica]) for replica in replicas)
        if len(replicas) == count:
            return f"ranks {ranks} do not agree in {where}, and no majority says which of them is wrong"
        return f"rank{'s' * (len(replicas) > 1)} {ranks} in {where}"


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers, modulo 2^64: an int64 scalar on its device.

    As many elements as possible are read as int64, which is twenty times as fast on a CPU. The result depends on
    the tensor's offset in its storage, which is the same on all replicas.
    """
    flat, size = tensor.reshape(-1), tensor.element_size()
    if flat.storage_offset() * size % 8:
        return flat.view(_INTEGERS[size]).sum(dtype=torch.int64)
    paired = flat.numel() // (8 // size) * (8 // size)
    return flat[:paired].view(torch.int64).sum() + flat[paired:].view(_INTEGERS[size]).sum(dtype=torch.int64)


def differing(values: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of values that differ from the majority, or all indices if there is no majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return tuple(range(len(values)))
    return tuple(replica for replica, each in enumerate(values) if each != value)
