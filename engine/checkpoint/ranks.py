"""The ranks that write or read together: what one of them fails in, all of them report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weft.engine.checkpoint.errors import CheckpointError, explain

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A group of ranks; alone by default.

    Attributes:
        rank: this rank.
        gather: returns every rank's value, in order of rank; a collective call.
    """

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def together(self, folder: Path, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; a collective call.

        Raises:
            CheckpointError: on every rank, the first failing rank's error.
        """
        result, error = self._attempt(action)
        self._agree(self.gather(None if error is None else str(explain(folder, error))), error)
        return result

    def collect(self, folder: Path, action: Callable[[], T]) -> list[T]:
        """What ``action`` returns on each rank, in order of rank; errors as in `together`."""
        result, error = self._attempt(action)
        outcomes = self.gather((result, None if error is None else str(explain(folder, error))))
        self._agree([text for _, text in outcomes], error)
        return [value for value, _ in outcomes]

    @staticmethod
    def _attempt(action: Callable[[], T]) -> tuple[Any, Exception | None]:
        try:
            return action(), None
        except Exception as error:  # even of a defect, so that the other ranks do not wait for this one
            return None, error

    @staticmethod
    def _agree(texts: list[str | None], cause: Exception | None) -> None:
        for text in texts:
            if text is not None:
                raise CheckpointError(text) from cause
