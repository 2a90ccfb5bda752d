"""The interface of an emulated job for its groups and channels: this rank, and the other ranks' behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weft.comm.emulated.clock import EmulatedClock
from weft.comm.emulated.conversation import EmulationError, Recorder


@dataclass(frozen=True)
class Call:
    """One collective.

    Attributes:
        operation: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``, ``broadcast``, ``reduce``,
            ``gather``, ``scatter``, ``barrier``, ``send`` or ``recv``.
        ranks: the members' global ranks.
        num_hosts: that the members are on.
        crosses: whether they are at several sites.
        num_bytes: of the whole: the sum's, or all members' parts together.
    """

    operation: str
    ranks: tuple[int, ...]
    num_hosts: int
    crosses: bool
    num_bytes: int


class Step(Protocol):
    """The emulated ranks' behaviour in the current step of this rank."""

    def sent(self, peer: int, tag: str, num_bytes: int, at_s: float) -> None:
        """This rank sends the message of receive ``tag`` to global rank ``peer``."""
        ...

    def arrival_s(self, peer: int, tag: str) -> float:
        """When the message of receive ``tag`` from global rank ``peer`` is here."""
        ...

    def ready_s(self, operation: str, ranks: Sequence[int], root: int | None) -> float:
        """When the last emulated member of a collective has come to it, or its root, where the others need not."""
        ...

    def ended(self, operation: str, ranks: Sequence[int], at_s: float) -> None:
        """This rank has waited for that collective, as the others do."""
        ...


class NoStep:
    """Between steps and before the first: everybody is ready, and nobody sends."""

    def sent(self, peer: int, tag: str, num_bytes: int, at_s: float) -> None:
        """See `Step`."""
        raise EmulationError(f"this rank sends {tag} to rank {peer}, which is in no step and expects nothing")

    def arrival_s(self, peer: int, tag: str) -> float:
        """See `Step`."""
        raise EmulationError(f"this rank waits for {tag} of rank {peer}, which is in no step and sends nothing")

    def ready_s(self, operation: str, ranks: Sequence[int], root: int | None) -> float:
        """See `Step`."""
        return 0.0

    def ended(self, operation: str, ranks: Sequence[int], at_s: float) -> None:
        """See `Step`."""


class Meeting(Protocol):
    """Where this rank meets the emulated ones; see `weft.comm.emulated.world.EmulatedWorld`."""

    rank: int
    clock: EmulatedClock
    recorder: Recorder
    device: torch.device
    step: Step

    def group(self, ranks: Sequence[int]) -> Any:
        """A process group of global ``ranks``."""
        ...

    def ends_s(self, operation: str, ranks: tuple[int, ...], num_bytes: int, root: int | None, start_s: float) -> float:
        """When an operation ends that could begin at ``start_s`` for this rank."""
        ...
