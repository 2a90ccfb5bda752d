"""The layout of an attempt: the ranks of each host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Layout:
    """The hosts of an attempt.

    Attributes:
        slots: ranks by host, in the order of their numbers.
        master: address and port of the ranks' rendezvous.
        arguments: of each rank.
    """

    slots: Mapping[str, int]
    master: tuple[str, int]
    arguments: tuple[str, ...]

    @cached_property
    def num_ranks(self) -> int:
        """Return the number of ranks on all hosts."""
        return sum(self.slots.values())

    @cached_property
    def ranks(self) -> Mapping[str, list[int]]:
        """Return the global ranks by host."""
        ends = accumulate(self.slots.values())
        pairs = zip(self.slots.items(), ends, strict=True)
        return {host: list(range(end - count, end)) for (host, count), end in pairs}

    def host_of(self, rank: int) -> str:
        """Return the host of a rank."""
        return next(host for host, ranks in self.ranks.items() if rank in ranks)
