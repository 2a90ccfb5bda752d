"""Records a prefill worker's steps in rings next to those of its training ranks, so that `weft watch` shows them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from pathlib import Path
from secrets import token_hex
from time import monotonic

from weft.engine.observability.event_ring import PREFILL, RingWriter, encode
from weft.inference.worker.gate import Span

logger = logging.getLogger(__name__)

CAPACITY = 4096
"""Records of a ring, which the collector reads a few times per second."""
CHECK_S = 1.0
"""Least seconds between two checks that rings are still there: a run's end removes them."""


class ChunkRecorder:
    """A ring for each rank whose device the worker shares.

    Rings exist only while the rank records events itself. Without them nothing is recorded, and a worker that outlives
    a run makes others for the next.
    """

    def __init__(self, folder: str, ranks: Sequence[int], stages: int) -> None:
        """Record in the rings of ``folder``, which may appear later. Empty records nothing.

        Args:
            ranks: the worker's ranks, stage after stage.
        """
        each = len(ranks) // stages
        self._folder = Path(folder) if folder else None
        self._ranks = [ranks[first : first + each] for first in range(0, len(ranks), each)] if each else []
        self._rings: dict[int, RingWriter] = {}
        self._checked_s = -inf
        self._has_warned = False

    def add(self, tokens: int, spans: Sequence[Span]) -> None:
        """Record a step of ``tokens`` with its span in each stage. Never raises for want of a ring."""
        if self._folder is None:
            return
        if monotonic() - self._checked_s > CHECK_S:
            self._open(self._folder)
            self._checked_s = monotonic()
        code = encode(PREFILL, -1, tokens)
        for ranks, (start_s, end_s, _) in zip(self._ranks, spans, strict=False):
            for rank in ranks:
                if (ring := self._rings.get(rank)) is not None:
                    ring.write(code, 0, 0, start_s, end_s)

    def _open(self, folder: Path) -> None:
        self._rings = {rank: ring for rank, ring in self._rings.items() if not ring.is_lost}
        for rank in (rank for ranks in self._ranks for rank in ranks if rank not in self._rings):
            try:
                if (folder / f"rank{rank}").exists():
                    # Another worker of the rank may start now, or has left a ring that the collector has to read.
                    self._rings[rank] = RingWriter(folder, rank, CAPACITY, f"{PREFILL}-{token_hex(8)}-")
            except (OSError, ValueError) as error:  # prompts are computed all the same
                if not self._has_warned:
                    logger.warning("prefills are missing in the timeline of rank %d: %s", rank, error)
                self._has_warned = True
