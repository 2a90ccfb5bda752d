"""Errors in the middle of a step: nothing of it reaches a later step, which would otherwise compute on it silently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from weft.engine.zero import NonFiniteError, ReplicasDiffer, Sharding

AGREED = (NonFiniteError, ReplicasDiffer)
"""Errors that every rank raises at the same point, where no messages are on their way."""


class Interruption:
    """The last step that an error has interrupted on this rank."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding, self._what = sharding, ""

    @contextmanager
    def caught(self, what: str) -> Iterator[None]:
        """Context in which ranks exchange messages. After an error, drop what the sharding holds of the step.

        Raises:
            RuntimeError: an earlier one was interrupted, and the next messages could be taken for its messages.
        """
        if self._what and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{what}: an error has interrupted {self._what} on this rank, so that messages of it may be on their "
                "way. Start all ranks again, from a checkpoint"
            )
        try:
            yield
        except BaseException as error:
            self._what = "" if isinstance(error, AGREED) else what
            self._sharding.drop_step()
            raise
