"""How fast a link is in the steps of a run, and whether it has become slow."""

from __future__ import annotations

SLOW_SHARE = 0.5
"""Share of its usual speed below which a link is slow."""
SLOW_READINGS = 4
"""Readings in a row that are slow, before a link is; with the seconds over which each takes the fastest moment, a
link has to be slow for about six seconds, or for so many steps where they are longer."""
KNOWN_READINGS = 4
"""Readings before which nothing is usual yet."""
REMEMBERED = 32
"""Readings after which the speed of before counts for a third of what is usual: a change for good becomes so."""


class LinkSpeed:
    """The readings of a link, one for each report in which it was in use or, where steps are longer, for each step.

    Transfers of all steps are alike, those within a step are not. So a step that goes on is read as a whole,
    by its fastest moment, also where an evaluation or a checkpoint makes it last.

    Attributes:
        usual_bps: bits in a second at the fastest moment of a reading, as it has been.
        fastest_bps: the same of the slow readings since the last one that was not.
    """

    def __init__(self) -> None:
        """Of a link from which nothing was read."""
        self.usual_bps = 0.0
        self.fastest_bps = 0.0
        self._sent_bytes = 0
        self._step = -1
        self._peak_bps = 0
        self._readings = 0
        self._slow = 0

    @property
    def is_slow(self) -> bool:
        """Whether the last readings were far below what is usual."""
        return self._slow >= SLOW_READINGS

    def read(self, step: int, sent_bytes: int, peak_bps: int) -> None:
        """Take a report: the rank's step, the bytes that have gone over the link, and its fastest of late in bits/s."""
        if sent_bytes <= self._sent_bytes or not peak_bps:
            return  # it was not used, which says nothing
        is_first, self._sent_bytes = not self._sent_bytes, sent_bytes
        if is_first:
            return
        if step != self._step:
            self._end_reading()
            self._step, self._peak_bps = step, 0
        self._peak_bps = max(self._peak_bps, peak_bps)

    def _end_reading(self) -> None:
        peak = float(self._peak_bps)
        if not peak:
            return
        if self._readings < KNOWN_READINGS or peak >= SLOW_SHARE * self.usual_bps:
            self._slow, self.fastest_bps = 0, 0.0
        else:
            self._slow, self.fastest_bps = self._slow + 1, max(self.fastest_bps, peak)
        self._readings += 1
        self.usual_bps += (peak - self.usual_bps) / min(self._readings, REMEMBERED)
