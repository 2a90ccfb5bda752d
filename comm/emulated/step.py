"""The behaviour of emulated ranks in a step of this rank, and the collectives whose duration is modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.comm.emulated.operation_log import EmulationError


@dataclass(frozen=True)
class Call:
    """The collective whose duration is modelled.

    Attributes:
        operation: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``, ``broadcast``, ``reduce``,
            ``gather``, ``scatter``, ``barrier``, ``send`` or ``recv``.
        ranks: the members' global ranks.
        num_hosts: number of hosts of the members.
        sites: numbers of the members' sites.
        num_bytes: size of the sum, or of all members' parts together.
    """

    operation: str
    ranks: tuple[int, ...]
    num_hosts: int
    sites: tuple[int, ...]
    num_bytes: int

    @property
    def crosses(self) -> bool:
        """True if the members are at several sites."""
        return len(self.sites) > 1


class Step(Protocol):
    """The emulated ranks' behaviour in the current step of this rank."""

    def sent(self, peer: int, tag: str, num_bytes: int, at_s: float) -> None:
        """Report that this rank sends the message of receive ``tag`` to global rank ``peer``."""
        ...

    def arrival_s(self, peer: int, tag: str) -> float:
        """Return when the message of receive ``tag`` from global rank ``peer`` arrives."""
        ...

    def ready_s(self, operation: str, ranks: Sequence[int], root: int | None) -> float:
        """Return when the last emulated member joins a collective. If only its root has to join, when the root does."""
        ...

    def ended(self, operation: str, ranks: Sequence[int], at_s: float) -> None:
        """Report that this rank and the other members have waited for the collective until ``at_s``."""
        ...


class NoStep:
    """The behaviour outside of steps: every emulated rank is ready for collectives, and none sends messages."""

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
