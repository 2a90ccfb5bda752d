"""Publishes this rank's phase, and its progress in its row, to the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from weft.comm.links import SiteEndpoint
from weft.engine.observability.slots import SlotObserver
from weft.engine.supervision.place_writer import PlaceWriter
from weft.engine.supervision.places import LinkReading, Phase

PLACES = "WEFT_PLACES"
"""Environment variable with the path of this host's progress page."""
ATTEMPT = "WEFT_ATTEMPT"
"""Environment variable that numbers the attempts of a run, from 0."""
MEASURE_EVERY_S = 2.0
"""Seconds between steps whose computations are timed on the device, because each mark takes microseconds."""


class PlaceObserver:
    """An observer of slots that writes each beginning and end to the host's page. See `SlotObserver`."""

    def __init__(self, place: PlaceWriter, steps_done: Callable[[], int]) -> None:
        """Write to ``place``. ``steps_done`` returns the number of steps before the one that begins."""
        self._place, self._steps_done = place, steps_done
        self.slot_begins, self.slot_ends = place.slot_begins, place.slot_ends  # with no call between: each takes time

    def step_begins(self, num_microbatches: int) -> None:
        """Publish the beginning of a step."""
        self._place.begin_step(self._steps_done() + 1, num_microbatches)


class Heartbeat:
    """This rank's heartbeat. Without a progress page there is no supervisor, and all methods do nothing."""

    def __init__(self, place: PlaceWriter | None = None) -> None:
        """Write to ``place``, if there is one."""
        self.place = place
        self._on_device, self._measured_at = False, 0.0

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Heartbeat:
        """Return the heartbeat of a rank whose agent has set ``WEFT_PLACES`` and ``WEFT_ATTEMPT``, besides torchrun's
        variables.

        Raises:
            ValueError: what ``WEFT_PLACES`` names is no page of places with room for this rank.
        """
        if not variables.get(PLACES):
            return cls()
        attempt = int(variables.get(ATTEMPT, "0"))
        local_rank, rank = int(variables["LOCAL_RANK"]), int(variables["RANK"])
        return cls(PlaceWriter(Path(variables[PLACES]), local_rank=local_rank, rank=rank, attempt=attempt))

    def enter(self, phase: Phase) -> None:
        """Publish the beginning of a phase."""
        if self.place is not None:
            self.place.enter(phase)

    def kept(self, step: int) -> None:
        """Publish that a memory checkpoint of ``step`` is complete on all hosts."""
        if self.place is not None:
            self.place.keep(step)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Context of ``phase``, in which no step runs."""
        self.enter(phase)
        yield
        self.enter(Phase.steady)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for other ranks outside of transfers. All ranks enter it equally often in a step."""
        if self.place is None:
            yield
            return
        self.place.begin_wait()
        yield
        self.place.end_wait()

    def observers(self, steps_done: Callable[[], int]) -> list[SlotObserver]:
        """Return the observers of slots. See `PlaceObserver`."""
        return [] if self.place is None else [PlaceObserver(self.place, steps_done)]

    def follow(self, device: torch.device, endpoint: SiteEndpoint | None, peers: Collection[int]) -> None:
        """Publish the memory of ``device`` and the counters of the links to ``peers``, until the attempt ends."""
        if self.place is None:
            return
        if device.type == "cuda":
            self._on_device = True
            self.place.measure_device()
            self.place.gauge_device(partial(torch.cuda.memory_allocated, device))
        if endpoint is not None:
            self.place.gauge_links(lambda: [_reading(endpoint, peer) for peer in peers])

    def measured(self, busy_s: Callable[[], float]) -> None:
        """Publish the computation time of a step that the device has finished. ``busy_s`` is called occasionally."""
        if self.place is not None and self._on_device and monotonic() - self._measured_at > MEASURE_EVERY_S:
            self._measured_at = monotonic()
            self.place.add_busy(busy_s())

    def close(self) -> None:
        """Stop the heartbeat at the end of the rank."""
        if self.place is not None:
            self.place.close()


def _reading(endpoint: SiteEndpoint, peer: int) -> LinkReading:
    found = endpoint.counters(peer)
    return LinkReading(
        peer=peer,
        sent_bytes=found.sent_bytes,
        received_bytes=found.received_bytes,
        resent_chunks=found.resent_chunks,
        broken=found.broken,
        ready=found.ready,
        rtt_s=found.rtt_s,
    )
