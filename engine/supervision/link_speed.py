"""Detection of links whose speed has dropped in the course of a run."""

from __future__ import annotations

SLOW_SHARE = 0.5
"""Share of its usual speed below which a link is slow."""
SLOW_READINGS = 4
"""Consecutive slow readings after which a link counts as slow. Each reading covers some seconds, so this takes about
six seconds, or that number of steps if these are longer."""
KNOWN_READINGS = 4
"""Readings needed before a usual speed is known."""
REMEMBERED = 32
"""Readings, and steps, after which earlier ones weigh a third in the usual speed, so that it follows changes."""


class LinkSpeed:
    """Speed readings of a link: one for each report of a rank or, if steps are longer, one for each step.

    Transfers differ within a step, but not between steps. So a reading is the peak speed within a whole step. It ends
    with the step, or after the usual duration of a step, because steps take longer on a slow link.

    Attributes:
        usual_bps: usual peak of a reading, in bit/s.
        fastest_bps: highest peak of the current series of slow readings, in bit/s.
    """

    def __init__(self) -> None:
        """Start without readings."""
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
        """True if the last readings were far below the usual speed."""
        return self._slow >= SLOW_READINGS

    def read(self, step: int, sent_bytes: int, peak_bps: int, *, trains: bool = True) -> None:
        """Process a report of the sending rank.

        Args:
            step: its current step.
            sent_bytes: total bytes sent over the link.
            peak_bps: recent peak speed, in bit/s.
            trains: whether the rank is training. Other phases, such as evaluation, have other transfers.
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
