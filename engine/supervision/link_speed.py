"""How fast a link is in the steps of a run, and whether it has become slow."""

from __future__ import annotations

SLOW_SHARE = 0.5
"""Share of its usual speed below which a link is slow."""
SLOW_READINGS = 4
"""Readings in a row that are slow, before a link is; with the seconds over which each takes the fastest moment, a
link has to be slow for about six seconds, or for as long as so many steps where they are longer."""
KNOWN_READINGS = 4
"""Readings before which nothing is usual yet."""
REMEMBERED = 32
"""Readings, and steps, after which those of before count for a third of what is usual: a change for good becomes so."""


class LinkSpeed:
    """The readings of a link: one for each report of a rank or, where steps are longer, as many as a step takes.

    Transfers of all steps are alike, those within a step are not. So what is read is the fastest moment of a whole
    step, which ends with the step, or when it has taken as long as steps do: on a slow link they take longer.

    Attributes:
        usual_bps: bits in a second at the fastest moment of a reading, as it has been.
        fastest_bps: the same of the slow readings since the last one that was not.
    """

    def __init__(self) -> None:
        """Create the speed of a link without readings."""
        self.usual_bps = 0.0
        self.fastest_bps = 0.0
        self._sent_bytes = 0
        self._step = -1
        self._peaks: list[int] = []
        self._readings = self._slow = 0
        self._reports = self._steps = 0
        self._usual_reports = 0.0

    @property
    def is_slow(self) -> bool:
        """True if the last readings were far below what is usual."""
        return self._slow >= SLOW_READINGS

    def read(self, step: int, sent_bytes: int, peak_bps: int, *, trains: bool = True) -> None:
        """Take a report of the rank that sends.

        Args:
            step: that it is in.
            sent_bytes: that have gone over the link.
            peak_bps: bits in a second at the fastest moment of late.
            trains: it does nothing else within the step, such as an evaluation, whose transfers are others.
        """
        is_used = sent_bytes > self._sent_bytes > 0 and peak_bps > 0
        self._sent_bytes = max(self._sent_bytes, sent_bytes)
        if not (is_used and trains):
            return
        if step != self._step:
            self._end_step()
            self._step = step
        self._reports += 1
        self._peaks.append(peak_bps)
        if self._steps and len(self._peaks) >= round(self._usual_reports):
            self._end_reading()

    def _end_step(self) -> None:
        if self._peaks:
            self._end_reading()
        if self._reports:
            self._steps += 1
            self._usual_reports += (self._reports - self._usual_reports) / min(self._steps, REMEMBERED)
            self._reports = 0

    def _end_reading(self) -> None:
        peak = float(max(self._peaks))
        self._peaks.clear()
        if self._readings < KNOWN_READINGS or peak >= SLOW_SHARE * self.usual_bps:
            self._slow, self.fastest_bps = 0, 0.0
        else:
            self._slow, self.fastest_bps = self._slow + 1, max(self.fastest_bps, peak)
        self._readings += 1
        self.usual_bps += (peak - self.usual_bps) / min(self._readings, REMEMBERED)
