"""The deal: which replica reads which micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Dealer(Protocol):
    """An iterator over a replica's micro-batches, of which replicas may read different numbers."""

    def deal(self, counts: Sequence[int]) -> None:
        """Read as many micro-batches of each step as ``counts`` has for this replica, from the next step on.

        All ranks call it between two steps. Micro-batches are assigned as in `dealt`.
        """
        ...


def dealt(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each replica's micro-batches of a step, in the order in which it reads them.

    Number k R + r belongs to replica r of R in round k. A replica with a smaller count gives away its first ones, and
    never its last. So all replicas are at the same position of the data after their last micro-batch.

    Raises:
        ValueError: a replica would read none, or ``counts`` has no sum that all replicas could share equally.
    """
    replicas = len(counts)
    rounds, rest = divmod(sum(counts), replicas)
    if rest or min(counts) < 1:
        raise ValueError(f"counts={list(counts)}: give each replica at least 1, and {replicas} a whole number each")
    own = [[k * replicas + r for k in range(max(0, rounds - counts[r]), rounds)] for r in range(replicas)]
    for number in sorted(set(range(rounds * replicas)).difference(*own)):
        own[max(range(replicas), key=lambda r: counts[r] - len(own[r]))].append(number)
    return tuple(tuple(sorted(numbers)) for numbers in own)


class StepDeal:
    """The micro-batches that the replicas of an engine read in a step.

    Attributes:
        counts: micro-batches of each replica after some were moved. Empty if all read the usual number.
        numbers: this replica's micro-batches of the current step, if they are not the usual ones. See `dealt`.
        is_possible: True if the data of the last step could be dealt.
    """

    def __init__(self, replica: int, num_replicas: int) -> None:
        self._replica, self._num_replicas, self._usual = replica, num_replicas, 0
        self.counts: tuple[int, ...] = ()
        self.numbers: tuple[int, ...] = ()
        self.is_possible = False

    def begin(self, batches: Iterator | None, usual: int) -> int:
        """Deal the micro-batches of the next step, and return the number that this replica reads.

        That is ``usual`` if ``batches`` is no `Dealer`, or ``usual`` for all replicas is not the sum of `counts`.
        """
        self._usual, even = usual, (usual,) * self._num_replicas
        counts = self.counts if sum(self.counts) == sum(even) else even
        self.numbers, self.is_possible = (), isinstance(batches, Dealer)
        if isinstance(batches, Dealer):
            self.numbers = () if counts == even else dealt(counts)[self._replica]
            batches.deal(counts)
        return len(self.numbers) or usual

    def number_of(self, microbatch: int) -> int:
        """Return the number of one of this replica's micro-batches of the current step among those of all replicas."""
        if microbatch < len(self.numbers):
            return self.numbers[microbatch]
        return microbatch * self._num_replicas + self._replica

    @property
    def excess(self) -> float:
        """Number of micro-batches that this replica reads, as a multiple of the usual one."""
        return len(self.numbers) / self._usual if self.numbers else 1.0
