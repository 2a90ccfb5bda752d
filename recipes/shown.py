"""Display of a run: a bar of steps on a terminal, lines of steps in a file, and each warning once."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import TextIO

from tqdm import tqdm

from weft.conf.host.processes import columns_behind, columns_of
from weft.engine.distributed import first_to_print

LINE_S = 10.0
"""Seconds between the lines of a file."""


class Shown:
    """A bar of steps, redrawn at every one, where ``stream`` is a terminal; otherwise lines `LINE_S` apart."""

    def __init__(
        self,
        *,
        total: int,
        start: int,
        is_on: bool,
        stream: TextIO | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Begin to show.

        Args:
            total: steps of the run.
            start: steps already done.
            is_on: True if steps are shown at all; notes are in any case.
            stream: stderr, unless given.
            clock: the time in seconds.
        """
        columns = columns_behind(stream or sys.stderr, os.environ)
        own = columns_of(stream or sys.stderr) > 0
        self._has_lines = is_on and not columns
        self._bar = tqdm(
            total=total,
            initial=start,
            disable=not (is_on and columns),
            unit="step",
            dynamic_ncols=own,
            ncols=None if own else columns,
            file=stream,
        )
        self._total, self._start, self._clock = total, start, clock
        self._began = clock()
        self._last = -LINE_S

    def step(self, step: int, text: str | None) -> None:
        """Show that ``step`` steps are done, with ``text`` about the last one; None leaves what stands there."""
        if text is not None:
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(1)
        now = self._clock()
        if text is not None and self._has_lines and (now - self._last >= LINE_S or step == self._total):
            self._last = now
            left = (self._total - step) * (now - self._began) / max(step - self._start, 1)
            self.note(f"step {step}/{self._total}: {text}, {timedelta(seconds=round(left))} left")

    def go_back(self, step: int) -> None:
        """Show that only ``step`` steps are done after all."""
        self._bar.n = step
        self._bar.refresh()
        self._start, self._began = step, self._clock()

    def note(self, text: str) -> None:
        """Print a line, on a terminal above the bar."""
        self._bar.write(text)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def warn_once(stream: TextIO) -> None:
    """Print Weft's warnings to a stream, each on the first rank that has it."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(lambda record: first_to_print(record.getMessage()))
    logging.getLogger("weft").addHandler(handler)
