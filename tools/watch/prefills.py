"""Events of prefill workers, each in the step of its rank during which it began.

A worker does not know the numbers of steps, but it has the clock of its ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from weft.engine.observability.event_ring import DTYPE, RECORD_WORDS, RingReader

STORED = np.dtype([("rank", "i8"), *DTYPE.descr])
NO_EVENTS = np.empty(0, STORED)
READS_KEPT = 16
"""Reads with ends of steps that are kept for prefills which are read later."""


def stored(readers: Iterable[RingReader]) -> np.ndarray:
    """Return the records of rings since the last call, with their ranks."""
    found = [(reader.rank, words) for reader in readers if len(words := reader.read_words())]
    if not found:
        return NO_EVENTS
    ranks, records = zip(*found, strict=True)
    words = np.empty((sum(map(len, records)), 1 + RECORD_WORDS), "u8")
    words[:, 0] = np.repeat(ranks, list(map(len, records)))
    np.concatenate(records, out=words[:, 1:])
    return words.view(STORED)[:, 0]


class Prefills:
    """Reads the rings of a host's prefill workers.

    Attributes:
        readers: the rings by file name.
    """

    def __init__(self) -> None:
        self.readers: dict[str, RingReader] = {}
        self._waiting = NO_EVENTS
        self._ended: deque[np.ndarray] = deque(maxlen=READS_KEPT)

    def read(self, opened: Mapping[str, RingReader]) -> None:
        """Read all rings, those in ``opened`` for the first time, and remove those of workers that had ended."""
        self.readers |= opened
        ended = [name for name, reader in self.readers.items() if opened and reader.is_closed]
        found = stored(self.readers.values())
        for name in ended:
            self.readers.pop(name).remove()
        if len(found):
            self._waiting = np.concatenate([self._waiting, found])

    def steps_ended(self, events: np.ndarray) -> None:
        """Take the events of whole steps, in the time of the rings."""
        if len(events):
            self._ended.append(events)

    def placed(self, *, everything: bool = False) -> np.ndarray:
        """Return the prefills whose step is certain, with its number: the last that began before them.

        That is 0, the set-up, before the first. A prefill after the end of the last known step waits for the next one.

        Args:
            everything: True expects no further step.
        """
        events, steps = self._waiting, np.concatenate([NO_EVENTS, *self._ended]) if len(self._waiting) else NO_EVENTS
        is_placed = np.zeros(len(events), bool)
        for rank in np.unique(events["rank"]) if len(steps) else ():
            known = np.sort(steps[steps["rank"] == rank], order="start")
            if not len(known):
                continue
            own = events["rank"] == rank
            place = np.searchsorted(known["start"], events["start"][own], side="right") - 1
            events["step"][own] = np.where(place < 0, 0, known["step"][place])
            is_certain = (place < len(known) - 1) | (events["start"][own] <= known["end"][-1])
            is_placed[own] = is_certain | everything
        self._waiting = events[~is_placed]
        return events[is_placed]
