"""The ranks that write or read together. An error on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weft.comm.agreement import Gather, attempt
from weft.engine.checkpoint.errors import BY_NAME, CheckpointError, explain

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A group of ranks, by default a single one.

    Attributes:
        rank: this rank.
        gather: returns every rank's value, in order of rank. Collective call.
    """

    rank: int = 0
    gather: Gather = lambda value: [value]

    def together(self, folder: Path, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank. Collective call.

        Raises:
            CheckpointError: on every rank, the first failing rank's error.
        """
        return self._attempt(folder, action, share=False)[0]

    def collect(self, folder: Path, action: Callable[[], T]) -> list[T]:
        """Return the results of ``action`` on all ranks, in order of rank. Errors as in `together`."""
        return self._attempt(folder, action, share=True)

    def _attempt(self, folder: Path, action: Callable[[], T], *, share: bool) -> list[T]:
        def explained() -> T:
            try:
                return action()
            except CheckpointError:
                raise
            except Exception as error:  # including defects, so that the other ranks do not wait for this one
                raise explain(folder, error) from error

        outcome = attempt(explained, self.gather, share=share)
        if outcome.failure is not None:
            shared = BY_NAME.get(outcome.failure.kind, CheckpointError)
            raise shared(outcome.failure.text) from outcome.failure.cause
        return outcome.results
