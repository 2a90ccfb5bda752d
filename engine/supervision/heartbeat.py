"""Publishes this rank's phase, and its progress in its schedule row, to the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from weft.comm.links import SiteEndpoint
from weft.engine.observability.watcher import PROGRESS_PAGE, Phase, SlotObserver, Watcher
from weft.engine.supervision.messages import LinkReading
from weft.engine.supervision.progress_writer import ProgressWriter

ATTEMPT = "WEFT_ATTEMPT"
"""Environment variable that numbers the attempts of a run, from 0."""
MEASURE_EVERY_S = 2.0
"""Seconds between steps whose computations are timed on the device, because each mark takes microseconds."""


class ProgressObserver:
    """An observer of slots that writes each beginning and end to the host's page. See `SlotObserver`."""

    def __init__(self, place: ProgressWriter, steps_done: Callable[[], int]) -> None:
        """Write to ``place``. ``steps_done`` returns the number of completed steps when a step begins."""
        self._place, self._steps_done = place, steps_done
        self.slot_begins, self.slot_ends = place.slot_begins, place.slot_ends  # with no call between: each takes time

    def step_begins(self, num_microbatches: int) -> None:
        """Publish the beginning of a step."""
        self._place.begin_step(self._steps_done() + 1, num_microbatches)


class Heartbeat(Watcher):
    """A watcher that writes to this rank's record on its host's progress page."""

    def __init__(self, record: ProgressWriter) -> None:
        """Write to ``record``."""
        self.record = self.waits = record
        self._on_device, self._measured_at = False, 0.0

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Heartbeat:
        """Return the heartbeat of a rank, from torchrun's variables, ``WEFT_PLACES`` and ``WEFT_ATTEMPT``.

        Raises:
            ValueError: ``WEFT_PLACES`` is not the path of a progress page with a record for this rank.
        """
        attempt = int(variables.get(ATTEMPT, "0"))
        local_rank, rank = int(variables["LOCAL_RANK"]), int(variables["RANK"])
        return cls(ProgressWriter(Path(variables[PROGRESS_PAGE]), local_rank=local_rank, rank=rank, attempt=attempt))

    def enter(self, phase: Phase) -> None:
        """See `Watcher`, also for the methods below."""
        self.record.enter(phase)

    def kept(self, step: int) -> None:
        """Write the step of a complete memory checkpoint to the record."""
        self.record.keep(step)

    def observers(self, steps_done: Callable[[], int]) -> list[SlotObserver]:
        """Return the observer that writes to the record."""
        return [ProgressObserver(self.record, steps_done)]

    def follow(self, device: torch.device, links: SiteEndpoint | None, peers: Collection[int]) -> None:
        """Let the record's thread read the memory of ``device`` and the counters of ``links``."""
        if device.type == "cuda":
            self._on_device = True
            self.record.measure_device()
            self.record.gauge_device(partial(torch.cuda.memory_allocated, device))
        if links is not None:
            self.record.gauge_links(lambda: [_reading(links, peer) for peer in peers])

    def measured(self, busy_s: Callable[[], float]) -> None:
        """Publish a step's computation time on the device, which ``busy_s`` returns, unless the last one is recent."""
        if self._on_device and monotonic() - self._measured_at > MEASURE_EVERY_S:
            self._measured_at = monotonic()
            self.record.add_busy(busy_s())

    def close(self) -> None:
        """Stop the record's thread."""
        self.record.close()


def _reading(links: SiteEndpoint, peer: int) -> LinkReading:
    found = links.counters(peer)
    return LinkReading(
        peer=peer,
        sent_bytes=found.sent_bytes,
        received_bytes=found.received_bytes,
        resent_chunks=found.resent_chunks,
        broken=found.broken,
        ready=found.ready,
        rtt_s=found.rtt_s,
    )
