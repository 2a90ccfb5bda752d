"""The effects of a job on the world: the driver's implementation, or a test's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from weft.pipeline.culprit import JobRows


class Effects(Protocol):
    """Processes, messages, disk and people."""

    def start_agent(self, host: str, generation: int) -> None:
        """Start an agent on a host."""

    def tell(self, host: str, generation: int, message: Mapping[str, Any]) -> None:
        """Send a message to an agent, now or when it connects."""

    def record(self, event: str, **fields: Any) -> None:
        """Write into the journal."""

    def say(self, text: str) -> None:
        """Tell the user."""

    def rows(self) -> JobRows | None:
        """Return the ranks' rows, from the plan in the run's folder; None if it cannot be read."""

    def denied(self) -> Mapping[str, str]:
        """Hosts of the run that are to be left out, and why."""

    def deny(self, host: str, reason: str) -> None:
        """Put a host on the deny-list."""

    def newest_checkpoint(self) -> str:
        """The name of the run's newest checkpoint; empty if there is none."""
