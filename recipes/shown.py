"""Display of a run: a bar on a terminal or lines in a file, and each warning once."""

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
"""Least number of seconds between the lines in a file."""


class Shown:
    """Display of steps: a bar if ``stream`` is a terminal, otherwise lines that are `LINE_S` apart."""

    def __init__(
        self,
        *,
        total: int,
        start: int,
        is_on: bool,
        stream: TextIO | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Start the display.

        Args:
            start: steps that are already done.
            is_on: whether to display steps. Notes are printed in any case.
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
        """Display that ``step`` steps are done, and ``text`` about the last one. None keeps the previous text."""
        if text is not None:
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(1)
        now = self._clock()
        if text is not None and self._has_lines and (now - self._last >= LINE_S or step == self._total):
            self._last = now
            left = (self._total - step) * (now - self._began) / max(step - self._start, 1)
            self.note(f"step {step}/{self._total}: {text}, {timedelta(seconds=round(left))} left")

    def go_back(self, step: int) -> None:
        """Display that only ``step`` steps are done, because the others will be repeated."""
        self._bar.n = step
        self._bar.refresh()
        self._start, self._began = step, self._clock()

    def note(self, text: str) -> None:
        """Print a line. On a terminal it is above the bar."""
        self._bar.write(text)

    def close(self) -> None:
        """Close the display. The bar remains visible."""
        self._bar.close()


def warn_once(stream: TextIO) -> None:
    """Print Weft's warnings to a stream. A warning that several ranks log is printed by the first one only."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(lambda record: first_to_print(record.getMessage()))
    logging.getLogger("weft").addHandler(handler)
