"""The interface of checkpoints in host memory. `weft.engine.supervision` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class MemoryWriter(Protocol):
    """Takes checkpoints in host memory while training continues, more often than storage allows."""

    def before_step(self) -> None:
        """Wait until the state that the optimiser is about to change has been copied."""
        ...

    def take(self, client_state: Mapping[str, Any]) -> None:
        """Start a checkpoint of the step that has just ended. All ranks call this after the same step."""
        ...

    def finish(self) -> None:
        """Wait until the last checkpoint is complete on all hosts or has failed."""
        ...

    def recover(self, *, least_step: int = 0) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest complete checkpoint. Collective call.

        Returns:
            The checkpoint's step and ``client_state``, or None if there is no checkpoint.

        Args:
            least_step: checkpoints of earlier steps are ignored.
        """
        ...

    def forget(self) -> None:
        """Remove all checkpoints, because their steps are rolled back. Collective call."""
        ...

    def close(self) -> None:
        """Release the memory. Complete checkpoints stay."""
        ...

    def abandon(self) -> None:
        """Start no more copies, without collective calls."""
        ...
