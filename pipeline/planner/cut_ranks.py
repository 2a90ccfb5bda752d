"""The ranks of a route as arrays over layer ranges: their times, and their memory for activations."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LEVELS = 8
"""Levels of memory whose cuts are bounded apart, at most."""
ROUNDED_UP = 1 + 1e-9


@dataclass(frozen=True)
class Rank:
    """The costs of a pipeline rank, as arrays by its first layer and the first layer after it; see `window`.

    Attributes:
        forward_s, input_s, weight_s: seconds of a micro-batch; infinite if the layers do not fit the memory.
        ends_s: seconds per step of collectives over replicas and the optimiser.
        room_bytes: maximum bytes for activations.
        saved_bytes: minimum bytes that a micro-batch saves.
    """

    forward_s: Array
    input_s: Array
    weight_s: Array
    ends_s: Array
    room_bytes: Array
    saved_bytes: Array

    def window(self, rank: int, size: int) -> Rank:
        """Return the costs of the layers that a rank can hold if all ranks hold one at least.

        Args:
            rank: number of the rank: the first layer of its window, and one less than the first layer after it.
            size: number of layers, less those that the other ranks hold at least.
        """
        starts, stops = slice(rank, rank + size), slice(rank + 1, rank + 1 + size)
        return Rank(*(each[starts, stops] for each in vars(self).values()))


@dataclass(frozen=True)
class Way:
    """A route of a table: the bounds that its ranks set for a step, through compute and through memory.

    Attributes:
        busy_s: by rank, the least seconds of a step because of its compute.
        held_s: by rank, seconds for which one micro-batch occupies its memory; None if ranks hold several stages.
        more_s: by rank, seconds of a step during which no micro-batch occupies its memory.
    """

    ranks: list[Rank]
    busy_s: list[Array]
    held_s: list[Array] | None
    more_s: list[Array]
    microbatches: int

    def rank_s(self, cap_bytes: float) -> list[Array]:
        """Return, by rank, the least seconds of a step if no rank has more than ``cap_bytes`` for activations."""
        if self.held_s is None:
            return self.busy_s
        return [
            busy_s.clip(more_s + held_s * (self.microbatches / _in_flight(rank, cap_bytes)))
            for busy_s, more_s, held_s, rank in zip(self.busy_s, self.more_s, self.held_s, self.ranks, strict=True)
        ]

    def alone_s(self, least_bytes: float) -> list[Array]:
        """Return, by rank, the least seconds of a step if one micro-batch at a time fills the whole cap.

        Infinite for ranks where a micro-batch needs no more than ``least_bytes``.
        """
        import numpy as np

        assert self.held_s is not None
        return [
            np.where(rank.saved_bytes > least_bytes, busy_s.clip(more_s + held_s * self.microbatches), inf)
            for busy_s, more_s, held_s, rank in zip(self.busy_s, self.more_s, self.held_s, self.ranks, strict=True)
        ]


def _in_flight(rank: Rank, cap_bytes: float) -> Array:
    """Return how many micro-batches' activations fit the memory, at least 1."""
    import numpy as np

    return np.floor(rank.room_bytes.clip(max=cap_bytes) * ROUNDED_UP / rank.saved_bytes).clip(min=1.0)


def largest(of_ways: list[list[Array]]) -> list[Array]:
    """Return, by rank, the maximum over all routes."""
    import numpy as np

    return [np.maximum.reduce(each) for each in zip(*of_ways, strict=True)]


def smallest(of_ways: list[list[Array]]) -> list[Array]:
    """Return, by rank, the minimum over all routes."""
    import numpy as np

    return [np.minimum.reduce(each) for each in zip(*of_ways, strict=True)]


def levels_of(room_bytes: list[Array]) -> tuple[float, list[tuple[float, float]]]:
    """Return the least memory for activations that a rank may have, and intervals of the fullest rank's memory.

    There are at most `LEVELS` intervals, each given by its lowest and highest value.
    """
    import numpy as np

    most_bytes = min(float(each.max()) for each in room_bytes)
    values = np.unique(np.concatenate([each[(each > 0) & (each <= most_bytes)] for each in room_bytes]))
    parts = np.array_split(values, min(LEVELS, len(values)))
    return float(values[0]), [(float(part[0]), float(part[-1])) for part in parts]
