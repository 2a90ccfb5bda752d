"""The effects of a job on the world: the driver's implementation, or a test's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from weft.engine.supervision.culprit import JobRows
from weft.engine.supervision.messages import DesiredState


class Effects(Protocol):
    """Side effects of a job: processes, messages, files and output."""

    def start_agent(self, host: str, generation: int) -> None:
        """Start an agent on a host."""

    def tell(self, host: str, generation: int, state: DesiredState) -> None:
        """Send an agent the desired state of its host, now or when it connects."""

    def record(self, event: str, **fields: Any) -> None:
        """Append an event to the journal."""

    def say(self, text: str) -> None:
        """Print a line for the user."""

    def rows(self) -> JobRows | None:
        """Return the schedule rows of all ranks, from the plan in the run's folder, or None if it cannot be read.

        Raises:
            TimeoutError: storage hangs; call this again later.
        """

    def denied(self) -> Mapping[str, str]:
        """Return the reason for each of the run's hosts that is on the deny-list."""

    def deny(self, host: str, reason: str) -> None:
        """Add a host to the deny-list."""

    def newest_checkpoint(self) -> str:
        """Return the name of the run's newest checkpoint, or empty if there is none."""
