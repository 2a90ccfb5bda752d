"""An attempt of a rank to train: its resources, and values that its process keeps for later attempts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from weft.engine.observability.set_up import SetUpTimes
from weft.engine.planning.kept import Kept


class Attempt(ExitStack):
    """The resources of an attempt, which are released at its end.

    Attributes:
        interrupt: makes this rank's waits for other ranks fail, from any thread.
        kept: values for later attempts of this process, which the stack does not release.
        set_up: durations of the parts of the set-up.
        where: returns the current step and the range of its batches in the data, or None outside training.
    """

    def __init__(self, kept: Kept | None = None, set_up: SetUpTimes | None = None) -> None:
        """Start without resources."""
        super().__init__()
        self.kept, self.set_up = kept or Kept(), set_up or SetUpTimes()
        self.interrupt: Callable[[], None] = do_nothing
        self.where: Callable[[], tuple[int, tuple[int, int]]] | None = None


def do_nothing() -> None:
    """Do nothing. This is `interrupt` before an attempt has waits and after its end."""
