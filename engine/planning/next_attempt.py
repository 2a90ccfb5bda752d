"""Changes of a supervised run at its next checkpoint: ranks write them, and the driver reads them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.comm.values import decode, encode
from weft.conf.host.private import write_private

FILE = "next_attempt.json"
"""Name of the file in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class NextAttempt:
    """Changes that need a restart from a checkpoint, because costs have changed.

    Attributes:
        after_step: step after which they were planned. A later checkpoint is needed.
        reason: what has changed, in one line.
        slow_ranks: ranks whose hosts are replaced if spares wait. Empty replaces none.
        arguments: settings that change if no host is replaced.
    """

    after_step: int
    reason: str
    slow_ranks: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        texts, numbers = (self.reason, *self.arguments), (self.after_step, *self.slow_ranks)
        if {*map(type, texts)} != {str} or {*map(type, numbers)} != {int}:
            raise ValueError("next attempt: a number or a text is missing")

    def write(self, folder: Path) -> None:
        """Write the file in a run's folder. Raise OSError if that fails."""
        write_private(folder / FILE, encode(self).decode())


def read_next_attempt(folder: Path) -> NextAttempt | None:
    """Return the changes that a run's ranks have written, or None if there are none."""
    try:
        found: NextAttempt = decode((folder / FILE).read_bytes(), (NextAttempt,))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, NextAttempt) else None
